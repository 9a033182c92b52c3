"""Where a run's snapshots lie in this machine's memory, and whose they are: what a killed run leaves there is found and cleared.

    /dev/shm/headrace-RUN/owner-PID            who writes there: a line that names a process (holder.py), and its run folder
    /dev/shm/headrace-RUN/INCARNATION-STEP/    snapshots

A learner claims its run's folder, clears what a dead one left in it, and removes it at its end. Folders of other runs whose owners are all
dead are named in its log: they are another run's to clear, by being started again, or yours.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from learner import holder

PARENT = Path("/dev/shm")
_PREFIX, _OWNER = "headrace-", "owner-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a dead run left. Example: Left(folder=Path("/dev/shm/headrace-r1"), run_dir="/data/runs/first", num_bytes=3_221_225_472)"""

    folder: Path
    run_dir: str
    num_bytes: int


def snapshot_root(run_id: str) -> Path:
    """Folder of a run's snapshots on this machine: `/dev/shm/headrace-<run_id>`."""
    return PARENT / f"{_PREFIX}{run_id}"


def claim(root: Path, run_dir: Path, *, clear: bool) -> None:
    """Says that this process uses the folder; clear: nobody else does, so what is in it is a dead run's.

    Raises ValueError when a live process uses it for another run folder: two runs of one id would take each other's snapshots away.
    """
    for who, folder in _owners(root):
        if holder.is_here(who) and not holder.is_dead(who) and folder != str(run_dir):
            raise ValueError(f"run id {root.name.removeprefix(_PREFIX)} is in use on this machine by the run in {folder} ({who.split()[2]}); a copied run folder needs a run_id of its own: delete the file run_id in {run_dir}, or stop the other run")
    if clear:
        shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{_OWNER}{os.getpid()}").write_text(f"{holder.describe()}\n{run_dir}\n")


def release(root: Path) -> None:
    """This process is done with the folder; it goes with the last live one (ranks of torchrun may outlive their gateway)."""
    (root / f"{_OWNER}{os.getpid()}").unlink(missing_ok=True)
    if all(holder.is_dead(who) for who, _ in _owners(root)):
        shutil.rmtree(root, ignore_errors=True)


def left_behind() -> list[Left]:
    """Folders of runs whose owners are certainly dead."""
    found = []
    for folder in sorted(PARENT.glob(f"{_PREFIX}*")):
        owners = list(_owners(folder))
        if owners and all(holder.is_dead(who) for who, _ in owners):
            found.append(Left(folder=folder, run_dir=owners[-1][1], num_bytes=sum(_size(path) for path in folder.rglob("*"))))
    return found


def _owners(root: Path) -> list[tuple[str, str]]:
    """(who, run folder) of each; one that is half written counts as nobody."""
    lines = [path.read_text().splitlines() for path in sorted(root.glob(f"{_OWNER}*"))]
    return [(line[0], line[1]) for line in lines if len(line) == 2]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # removed meanwhile
