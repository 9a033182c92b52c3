"""A run folder: who holds it, whether the gateway answers, whether its journal is whole and its cuts are there."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.audit import segments
from deploy.audit.findings import Findings
from deploy.doctor.run_file import why_no_answer
from deploy.mistakes import Mistakes
from deploy.progress import read_all, surviving
from deploy.status import fetch, security_of
from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2


def findings(run_dir: Path) -> Iterator[str]:
    """One line each. Changes nothing, and may be called while the run goes on. Raises Mistakes for a folder that holds no run."""
    if not (run_dir / "resolved").is_dir():
        raise Mistakes([f"{run_dir}: holds no resolved/: it is no run folder; give the folder of a run"])
    config = _config(run_dir)
    is_running = is_held(run_dir / "learner.lock")
    yield from _holders(run_dir, config, is_running)
    yield from _gateway(run_dir, is_running)
    yield from _journal(run_dir)
    yield from _cuts(run_dir, config)


def is_held(lock: Path) -> bool:
    """Whether a process holds this lock file now."""
    try:
        file = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _holders(run_dir: Path, config: dict[str, Any], is_running: bool) -> Iterator[str]:
    lock = run_dir / "journal" / "LOCK"
    pid = lock.read_text().strip() if lock.is_file() else ""
    if is_held(lock):
        if not is_running:
            yield f"{lock} is held by process {pid}, and no learner holds {run_dir / 'learner.lock'}: a gateway was left behind, and a new launch would be refused; end process {pid}"
        return
    steps, made = config.get("steps"), _steps_made(run_dir)
    if pid and not is_running and steps is not None and made < steps:
        yield f"{lock} names process {pid}, which holds it no more, and {made} of {steps} steps are made: the run was stopped or died; launch it again, it goes on from its newest cut"


def _gateway(run_dir: Path, is_running: bool) -> Iterator[str]:
    file = run_dir / "gateway.address"
    if not file.is_file():
        if is_running:
            yield f"{file} is missing though a learner runs: its gateway has not come up; see {run_dir / 'logs' / 'gateway.log'}"
        return
    address = file.read_text().strip()
    why = why_no_answer(address)
    if why and not is_running:
        if _unfinished(run_dir):
            yield f"{file} is stale: nothing listens on {address} ({why}) and no learner runs; launch the run again, which writes it anew"
        return
    try:
        status = asyncio.run(fetch(address, security_of(str(run_dir))))
    except Mistakes as mistakes:
        for line in mistakes.lines:
            yield f"the gateway does not answer: {line}; see {run_dir / 'logs' / 'gateway.log'}"
        return
    yield from of_status(status)


def of_status(status: learner_pb2.GetStatusResponse) -> Iterator[str]:
    """What a gateway's own answer shows to be wrong. Pure."""
    if status.alarm:
        yield f"the gateway's alarm: {status.alarm}"
    for replica in status.replicas:
        if replica.attending and replica.state == rollout_pb2.REPLICA_STATE_STALE:
            yield f"replica {replica.replica_id} at {replica.address} is STALE at version {replica.loaded_version}, {status.newest_version} is published ({replica.detail or 'no detail'}): it serves nothing until a full update; if it stays so, restart it"
        if not replica.attending and not status.finished:
            yield f"replica {replica.replica_id} at {replica.address} is gone, last heard {replica.silent_s:.0f} s ago: its launcher starts again what dies, and a replica that was stopped on purpose stays away; else see its log"
        if replica.attending and replica.quarantined:
            yield f"replica {replica.replica_id} at {replica.address} failed {replica.failures_in_row} updates in a row and is left out of pushes ({replica.detail}): it fetches; see its log and the network between"


def _journal(run_dir: Path) -> Iterator[str]:
    """A tail may look torn while somebody writes it, so that is told only where nobody holds the journal."""
    if not segments.numbers_in(run_dir):
        return
    seen = Findings()
    for _ in segments.read(run_dir, seen):
        pass
    for line in seen.lines():
        yield f"{line}: put the segment back from a copy, or remove journal/ and go on from the newest cut alone"
    if not is_held(run_dir / "journal" / "LOCK"):
        for note in seen.notes:
            yield f"{note}: the next start cuts it off, and what was in it is made again"


def _cuts(run_dir: Path, config: dict[str, Any]) -> Iterator[str]:
    every = (config.get("checkpoint") or {}).get("every_steps")
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    marked = [folder for folder in folders if (folder / "cut.json").is_file()]
    made = _steps_made(run_dir)
    if every and made >= 2 * every and not marked:
        yield f"{made} steps are made, a cut is due every {every}, and {run_dir / 'checkpoints'} has no marked one ({len(folders)} unfinished): a crash would go back to the base weights; see checkpoint_failed in metrics.jsonl and {run_dir / 'logs' / 'trainer-0.log'}"


def _unfinished(run_dir: Path) -> bool:
    steps = _config(run_dir).get("steps")
    return steps is None or _steps_made(run_dir) < steps


def _steps_made(run_dir: Path) -> int:
    lines = surviving(read_all(run_dir / "metrics.jsonl"))
    return int(lines[-1]["step"]) if lines else 0


def _config(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "resolved" / "learner.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
