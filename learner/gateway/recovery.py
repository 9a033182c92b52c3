"""What a restarted gateway knows: the newest cut, and every record of the journal after it.

A cut whose journal is gone (copied to another run folder, or the disk of the journal lost) is continued: a record at the
beginning of the new journal says so, and the cut's payloads follow it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.gateway import cut_payloads, cuts
from learner.gateway.account import Record
from learner.gateway.appends import Appends, Key, key_of
from learner.gateway.books import Books
from learner.gateway.evaluation import PREFIX, Evaluations
from learner.gateway.groups import seq_of
from learner.gateway.ledger import Ledger
from learner.gateway.segments import Entry, JournalDamaged, Position
from learner.gateway.standing import TYPES, Standing
from learner.gateway.terms import Limits

_log = logging.getLogger("headrace.gateway.recovery")
LOST_VERSIONS = 1_000_000  # numbers left out where the same run goes on without its journal: some after the cut were used


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """The account as it was when a policy was published, or a cut of it was asked for, kept until its save is finished.

    keys: samples whose payloads it needs. asked: the trainer was asked for it by TakeBatch.
    """

    policy_step: int
    lineage: int
    state: dict[str, Any]  # msgpack-able: the account and the standing
    keys: tuple[Key, ...]
    asked: bool


@dataclass(kw_only=True, slots=True)
class Recovered:
    """State that was replayed; mutable while it is.

    first: a record that must begin the journal. missing: samples whose payloads only the cut has (`put_back` journals both).
    """

    ledger: Ledger
    standing: Standing
    evaluations: Evaluations
    payloads: dict[Key, Position]
    captures: dict[int, tuple[Capture, Position]]  # by policy step; announced saves that no cut covers yet
    cut: cuts.Cut | None
    first: Record | None = None
    missing: frozenset[Key] = frozenset()


def capture(ledger: Ledger, standing: Standing, evaluations: Evaluations, *, asked: bool = False) -> Capture:
    """A copy of everything that a cut of the newest policy needs."""
    state = {"account": ledger.state(), "evaluations": evaluations.to_state(), **standing.to_state()}
    return Capture(policy_step=ledger.step, lineage=ledger.lineage, state=state, keys=tuple(ledger.unfinished()), asked=asked)


def recover(journal: Appends, checkpoints: Path, limits: Limits, *, run_id: str) -> Recovered:
    """Reads cut and journal; blocks on the disk. Raises ValueError or JournalDamaged, saying what is wrong with which file."""
    cut = cuts.newest(checkpoints)
    result = _from_cut(cut, limits)
    if cut is not None and journal.is_empty():
        _continue(result, cut, journal, run_id)
    elif cut is not None and not journal.has(cut.position):
        _replay_continued(result, cut, journal)
    else:
        for entry in journal.read(after=cut.position if cut else None):
            _replay(result, entry)
    _locate(result, journal)
    return result


def _continue(result: Recovered, cut: cuts.Cut, journal: Appends, run_id: str) -> None:
    same_run = cut.run_id == run_id
    result.first = {"type": "continued", "step": cut.policy_step, "segment": cut.segment, "offset": cut.offset, "skip": LOST_VERSIONS if same_run else 0}
    _log.warning("journal %s is empty: going on from the cut in %s alone%s", journal.name, cut.folder, ", without what came after it" if same_run else "")
    journal.begin_after(cut.position)
    assert not list(journal.read())
    _apply(result, result.first)


def _replay_continued(result: Recovered, cut: cuts.Cut, journal: Appends) -> None:
    """A journal that does not hold the cut's record must begin with having continued it."""
    first: Entry | None = None
    for entry in journal.read():
        first = first or entry
        record = first.record
        if record["type"] != "continued" or (record["segment"], record["offset"]) != (cut.segment, cut.offset):
            raise ValueError(
                f"journal {journal.name} does not hold the record at {cut.position} that cut {cut.folder} was made after; put the journal "
                "of this run back, or copy the cut into the checkpoints folder of a new run_dir, where it goes on alone"
            )
        _replay(result, entry)


def _from_cut(cut: cuts.Cut | None, limits: Limits) -> Recovered:
    if cut is None:
        return Recovered(ledger=Ledger(limits), standing=Standing(), evaluations=Evaluations(), payloads={}, captures={}, cut=None)
    state = cuts.read_account(cut)
    evaluations = Evaluations.from_state(state["evaluations"]) if "evaluations" in state else Evaluations()  # absent from cuts of before there were any
    return Recovered(ledger=Ledger.from_state(limits, state["account"]), standing=Standing.from_state(state), evaluations=evaluations, payloads={}, captures={}, cut=cut)


def _replay(result: Recovered, entry: Entry) -> None:
    record = entry.record
    key = key_of(record)
    if key is not None:
        result.payloads[key] = entry.position
    _apply(result, record)
    asked = record["type"] == "cut_asked"
    if asked or (record["type"] == "published" and record["will_save"]):
        result.captures[record["step"]] = (capture(result.ledger, result.standing, result.evaluations, asked=asked), entry.position)
    elif record["type"] == "registered":
        result.captures.clear()


def _apply(result: Recovered, record: Record) -> None:
    if record["type"].startswith(PREFIX):
        result.evaluations.apply(record)
        return
    result.standing = result.standing.apply(record)
    if record["type"] not in TYPES:
        result.ledger.apply(record)


def _locate(result: Recovered, journal: Appends) -> None:
    """Where every payload lies that the account or an announced save needs. Raises JournalDamaged for one that is nowhere."""
    needed = {*result.ledger.retained(), *(key for announced, _ in result.captures.values() for key in announced.keys)}
    found = {key: position for key, position in result.payloads.items() if key in needed}
    found |= journal.find(needed - found.keys())
    missing = needed - found.keys()
    if missing:
        held = {key for key, _ in cut_payloads.read(result.cut.folder / cut_payloads.NAME)} if result.cut else set()
        if lost := missing - held:
            raise JournalDamaged(f"journal {journal.name} lacks the payloads of {len(lost)} samples, {sorted(lost)[0]} for one, and no cut holds them; put the journal of this run back")
    result.payloads, result.missing = found, frozenset(missing)


async def put_back(recovered: Recovered, books: Books) -> None:
    """Journals what only the cut has; returns once it is on the disk."""
    if recovered.first is not None:
        books.commit(recovered.first)
    if recovered.missing:
        assert recovered.cut is not None
        _log.warning("%d payloads are taken from the cut in %s", len(recovered.missing), recovered.cut.folder)
        for key, payload in cut_payloads.read(recovered.cut.folder / cut_payloads.NAME):
            if key in recovered.missing:
                await books.journal.drained()
                books.commit_samples([(key, {"type": "payload", "seq": seq_of(key[0]), "sample_index": key[1]}, payload)])
    await books.barrier()
