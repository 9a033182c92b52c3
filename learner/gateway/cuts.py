"""Cuts on disk: `step-000010/` with the ranks' files, ledger.msgpack, payloads.bin, and cut.json, which marks it, last.

A folder without the marker, or under another name (`step-000010.tmp`, where ranks write), is no cut. Marker and name come after
everything else is on the disk. A cut stands alone: copied elsewhere it restores without its journal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from learner.gateway import cut_payloads
from learner.gateway.appends import Key
from learner.gateway.segments import Position
from learner.sums import digest, file_sum
from protos import faultpoints

SCHEMA = 1
MARKER, ACCOUNT = "cut.json", "ledger.msgpack"
_FOLDER = re.compile(r"step-(\d+)")
_SAVE = re.compile(r"step-(\d+)(\.tmp)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A marked cut. Example: step 10 of lineage 0 of run r1, whose account holds the journal up to the record at (3, 17_408)"""

    folder: Path
    run_id: str
    policy_step: int
    lineage: int
    segment: int  # journal position of the last record that the account holds
    offset: int

    @property
    def position(self) -> Position:
        return Position(self.segment, self.offset)


def marked(folder: Path) -> Cut | None:
    """The cut in a folder; None where there is no marker. Raises ValueError for a marker that cannot be read."""
    if not (folder / MARKER).is_file():
        return None
    mark = _read_marker(folder)
    numbers = {name: int(mark[name]) for name in ("policy_step", "lineage", "segment", "offset")}
    return Cut(folder=folder, run_id=str(mark["run_id"]), **numbers)


def _read_marker(folder: Path) -> dict[str, Any]:
    path = folder / MARKER
    try:
        mark: dict[str, Any] = json.loads(path.read_bytes())
        if mark["schema"] != SCHEMA:
            raise ValueError(f"its schema is {mark['schema']}, this program reads {SCHEMA}")
        missing = [name for name in ("policy_step", "lineage", "segment", "offset", "run_id", "files") if name not in mark]
        if missing:
            raise ValueError(f"it says nothing of {', '.join(missing)}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no readable marker of a cut ({error}); delete {folder} to go on from the cut before it") from error
    return mark


def newest(checkpoints: Path) -> Cut | None:
    """The marked cut of the highest step, if there is one."""
    return max(all_marked(checkpoints), key=lambda cut: cut.policy_step, default=None)


def all_marked(checkpoints: Path) -> list[Cut]:
    """Every marked cut, oldest step first."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = (marked(folder) for folder in folders if _FOLDER.fullmatch(folder.name))
    return sorted((cut for cut in found if cut), key=lambda cut: cut.policy_step)


def read_account(cut: Cut) -> dict[str, Any]:
    """The account saved with a cut. Raises ValueError when it cannot be read or is not what was saved."""
    path = cut.folder / ACCOUNT
    try:
        data = path.read_bytes()
        if digest(data) != _read_marker(cut.folder)["files"][ACCOUNT]["xxh3"]:
            raise ValueError("its checksum is not the one in the marker")
        state = msgpack.unpackb(data, strict_map_key=False)
        if not isinstance(state, dict) or state.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete {cut.folder} to go on from the cut before it") from error
    return state


def sums(cut: Cut) -> dict[str, dict[str, Any]]:
    """What every file of a cut should be: of the gateway's from the marker, of the ranks' from sums-RANK.json."""
    expected: dict[str, dict[str, Any]] = dict(_read_marker(cut.folder)["files"])
    for path in sorted(cut.folder.glob("sums-*.json")):
        expected.update(json.loads(path.read_bytes()))
    return expected


def folder_of(checkpoints: Path, policy_step: int) -> Path:
    """Where the cut of a step lies."""
    return checkpoints / f"step-{policy_step:06d}"


def write(source: Path, cut: Cut, account: Mapping[str, Any], keys: Iterable[Key], payload: Callable[[Key], bytes]) -> None:
    """Makes a finished save the cut; blocks on the disk. keys, payload: of the samples still open.

    Raises OSError or JournalDamaged, and then there is no new cut.
    """
    if source != cut.folder:
        shutil.rmtree(cut.folder, ignore_errors=True)  # an unmarked leftover: a marked one is never saved again
    _write_whole(source / ACCOUNT, msgpack.packb({"schema": SCHEMA, **account}))
    cut_payloads.write(source / cut_payloads.NAME, keys, payload)
    own = {name: file_sum(source / name) for name in (ACCOUNT, cut_payloads.NAME)}
    for path in sorted(source.rglob("*")):
        _sync(path)
    _sync(source)
    faultpoints.point("before_cut_marker")
    mark = {name: getattr(cut, name) for name in ("run_id", "policy_step", "lineage", "segment", "offset")}
    _write_whole(source / MARKER, json.dumps({"schema": SCHEMA, **mark, "files": own}).encode())
    _sync(source)
    if source != cut.folder:
        source.rename(cut.folder)
    _sync(cut.folder.parent)
    faultpoints.point("after_cut_marker")


def retain(checkpoints: Path, keep: int, *, best: int | None = None, undecided: Collection[int] = ()) -> Cut:
    """Deletes all but the `keep` newest cuts, that of step `best` and those of `undecided` steps, and unmarked saves older than the newest one.

    Returns the oldest of the newest ones: from it on the journal is kept. An older best one stands alone.
    """
    cuts = all_marked(checkpoints)
    assert cuts, "retention runs after a cut was marked"
    kept = {cut.folder for cut in cuts[-keep:]} | {cut.folder for cut in cuts if cut.policy_step == best or cut.policy_step in undecided}
    for folder in checkpoints.iterdir():
        match = _SAVE.fullmatch(folder.name)
        if match and folder not in kept and int(match[1]) < cuts[-1].policy_step:
            (folder / MARKER).unlink(missing_ok=True)  # first, so that a half-deleted folder is no cut
            shutil.rmtree(folder, ignore_errors=True)
    return cuts[-keep:][0]


def _write_whole(path: Path, data: bytes) -> None:
    """The file has all of the data, on the disk, or its old content."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
