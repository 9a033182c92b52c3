"""A diagnosis on disk: one folder, made whole or not at all, and older ones that make room.

    run_dir/diagnosis/20261201-134501-HeadraceNoStep/
        verdict.txt        what holds the run back, why, what to do; the alarms; queues, idleness, GPUs
        picture.json       the same numbers for programs
        stacks/NAME.txt    every process of the run: its state in the kernel, the stacks of its threads
        logs/NAME.log      the end of each log of the run folder
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.watch.picture import Picture
from learner.watch.verdict import Cause
from protos.stacks import Process

LOG_BYTES = 64 << 10  # of the end of each log
MAX_PROCESSES = 64  # with a file of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What one diagnosis holds."""

    alarms: tuple[str, ...]  # "HeadraceNoStep: no version was published for 31 min"; the one that began it first
    causes: tuple[Cause, ...]  # the verdict first
    picture: Picture
    gpus: tuple[dict[str, Any], ...]  # a row each: where, index, use, memory, power
    processes: tuple[Process, ...]

    @property
    def verdict(self) -> str:
        return f"{self.causes[0].kind}: {self.causes[0].why}"


def write(root: Path, name: str, findings: Findings, logs: Sequence[Path]) -> Path:
    """The folder, named for now and the alarm. Raises OSError; then nothing of it stays."""
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    part = root / f".{folder.name}.{os.getpid()}"
    try:
        for below in ("stacks", "logs"):
            (part / below).mkdir(parents=True)
        (part / "verdict.txt").write_text("\n".join(text_of(findings)) + "\n")
        (part / "picture.json").write_text(json.dumps({"verdict": [asdict(cause) for cause in findings.causes], "alarms": findings.alarms, "picture": asdict(findings.picture), "gpus": findings.gpus}, indent=2) + "\n")
        for process in findings.processes[:MAX_PROCESSES]:
            (part / "stacks" / f"{_file_name(process.name)}-{process.pid}.txt").write_text(f"{process.name}\n{process.text}")
        for log in logs:
            (part / "logs" / log.name).write_bytes(_end_of(log))
        while folder.exists():
            folder = folder.with_name(folder.name + "+")
        part.rename(folder)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder


def make_room(root: Path, *, keep: int, max_bytes: int) -> None:
    """Removes the oldest diagnoses until at most `keep` stay, of at most max_bytes; the newest stays in any case."""
    folders = sorted(folder for folder in root.glob("[0-9]*") if folder.is_dir())
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in folders]
    while len(folders) > 1 and (len(folders) > keep or sum(sizes) > max_bytes):
        shutil.rmtree(folders.pop(0), ignore_errors=True)
        sizes.pop(0)


def text_of(findings: Findings) -> Iterable[str]:
    """verdict.txt, line by line."""
    first, *others = findings.causes
    yield f"Verdict: {first.kind}"
    yield f"  why: {first.why}"
    yield f"  do:  {first.do}"
    for cause in others:
        yield f"also {cause.kind}: {cause.why}"
    yield ""
    yield "Alarms"
    yield from (f"  {line}" for line in findings.alarms)
    yield ""
    yield from _numbers(findings.picture)
    yield ""
    yield "GPUs" if findings.gpus else "GPUs: none told (no NVML, or none in use)"
    yield from (f"  {row['where']:<16} {row['index']:>3} {row['uuid'][:12]:<12} use {row['use']:>4.0%}  {row['used_bytes'] / 2**30:>6.1f} of {row['size_bytes'] / 2**30:.1f} GiB  {row['power_w']:.0f} W" for row in findings.gpus)
    yield ""
    yield f"Processes ({len(findings.processes)}; their stacks are in stacks/)"
    yield from (f"  {process.pid:>8} {process.text.partition(chr(10))[0]:<90} {process.name}" for process in findings.processes)


def _numbers(picture: Picture) -> Iterable[str]:
    groups = ", ".join(f"{name} {value:.0f}" for name, value in picture.groups.items())
    yield f"The last {picture.over_s:.0f} s"
    yield f"  groups: {groups or 'none'}; at most open {_plain(picture.max_open)}"
    yield f"  the trainer waited for batches {_share(picture.waiting_share)} of the time; last version {_plain(picture.step_age_s)} s ago; its GPUs' use in the newest step {_share(picture.gpu_use)}"
    yield f"  samples at engines {_plain(picture.drawing)}, waiting for their score {_plain(picture.scoring)} in the mean; without score {_share(picture.unscored_share)}"
    yield f"  journal: a sync {_plain(picture.sync_s)} s, {_share(picture.sync_share)} of the time; disk free {_share(picture.disk_free_share)}"
    yield f"  weights: a transfer {_plain(picture.load_s)} s, {_share(picture.load_share)} of a replica's time"
    yield "  replica            state     idle  tokens/s  running  scoring  stalled"
    for one in picture.replicas:
        yield f"  {one.name:<18} {one.state:<8} {_share(one.idle_share):>5} {_plain(one.tokens_per_s):>9} {one.num_running:>8} {one.num_scoring:>8} {one.stalled_s:>6.0f} s"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _file_name(command: str) -> str:
    module = re.search(r"-m ([\w.]+)", command) or re.search(r"([\w.]+)", command)
    rank = re.search(r"--rank (\d+)", command)
    name = re.search(r"launch/([\w-]+)\.json", command)
    return "-".join([module[1] if module else "process", *([name[1]] if name else []), *([f"rank{rank[1]}"] if rank else [])])[:80]


def _end_of(log: Path) -> bytes:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read()
    except OSError as error:
        return f"cannot be read: {error}\n".encode()
