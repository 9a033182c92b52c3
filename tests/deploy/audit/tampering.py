"""Changes a copy of a run's journal as a forger would: whole entries, right checksums, right durable counts."""

from __future__ import annotations

import copy
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack

from deploy.audit.findings import Findings
from deploy.audit.program import audit
from deploy.audit.segments import read
from protos.trajectory.v1alpha1 import trajectory_pb2

Item = tuple[dict[str, Any], bytes]  # record, payload


def copied(run_dir: Path, to: Path) -> Path:
    return Path(shutil.copytree(run_dir, to / "run", ignore=shutil.ignore_patterns("model", "logs")))


def entries_of(run_dir: Path) -> list[Item]:
    return [(copy.deepcopy(entry.record), entry.payload) for entry in read(run_dir, Findings())]


def written(run_dir: Path, items: Iterable[Item]) -> None:
    """The journal anew, in one segment, each entry durable before the next. Cuts lie: their positions are moved along."""
    data = b"HEADRACE" + struct.pack("<I", 1)
    for record, payload in items:
        body = msgpack.packb(record)
        lengths = struct.pack("<III", len(body), len(payload), len(data))
        data += b"\xabHRE" + lengths + zlib.crc32(lengths + body + payload).to_bytes(4, "little") + body + payload
    for path in (run_dir / "journal").glob("*.log"):
        path.unlink()
    (run_dir / "journal" / "000000000000.log").write_bytes(data)


def forged(run_dir: Path, to: Path, change: Callable[[list[Item]], Iterable[Item]]) -> list[str]:
    """What the audit says of a copy whose journal was changed. The cuts are taken out, so that they do not tell on it."""
    run = copied(run_dir, to)
    shutil.rmtree(run / "checkpoints")
    written(run, change(entries_of(run)))
    return said(run)


def said(run_dir: Path) -> list[str]:
    return [str(finding) for finding in audit(run_dir).findings.found]


def trajectory(payload: bytes) -> trajectory_pb2.Trajectory:
    parsed = trajectory_pb2.Trajectory()
    parsed.ParseFromString(payload)
    return parsed
