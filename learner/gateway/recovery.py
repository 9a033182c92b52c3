"""What a restarted gateway knows: the newest cut, and every record of the journal after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.gateway import cuts
from learner.gateway.books import Key
from learner.gateway.groups import group_id
from learner.gateway.journal import Journal
from learner.gateway.ledger import Ledger
from learner.gateway.segments import Entry, Position
from learner.gateway.standing import TYPES, Standing
from learner.gateway.terms import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """The account as it was when a policy was published, kept until its save is finished."""

    policy_step: int
    lineage: int
    state: dict[str, Any]  # msgpack-able: the account and the standing


@dataclass(kw_only=True, slots=True)
class Recovered:
    """State that was replayed; mutable while it is."""

    ledger: Ledger
    standing: Standing
    payloads: dict[Key, Position]
    captures: dict[int, tuple[Capture, Position]]  # by policy step; announced saves that no cut covers yet


def capture(ledger: Ledger, standing: Standing) -> Capture:
    """A copy of everything that a cut of the newest policy needs."""
    return Capture(policy_step=ledger.step, lineage=ledger.lineage, state={"account": ledger.state(), **standing.to_state()})


def recover(journal: Journal, checkpoints: Path, limits: Limits) -> Recovered:
    """Reads cut and journal; blocks on the disk. Raises ValueError or JournalDamaged, saying what is wrong with which file."""
    cut = cuts.newest(checkpoints)
    result = _from_cut(cut, limits)
    found_cut = cut is None
    for entry in journal.read():
        _note_payload(result, entry)
        if cut is not None and entry.position <= cut.position:
            found_cut |= entry.position == cut.position
        else:
            _replay(result, entry)
    if cut is not None and not found_cut:
        raise ValueError(
            f"journal {journal.folder} does not hold the record at {cut.position} that cut {cut.folder} was made after; put the journal "
            "of this run back, or start a new run folder from the cut's weights"
        )
    needed = set(result.ledger.retained())
    result.payloads = {key: position for key, position in result.payloads.items() if key in needed}
    return result


def _from_cut(cut: cuts.Cut | None, limits: Limits) -> Recovered:
    if cut is None:
        return Recovered(ledger=Ledger(limits), standing=Standing(), payloads={}, captures={})
    state = cuts.read_account(cut)
    return Recovered(ledger=Ledger.from_state(limits, state["account"]), standing=Standing.from_state(state), payloads={}, captures={})


def _note_payload(result: Recovered, entry: Entry) -> None:
    if entry.record["type"] == "submitted":
        result.payloads[group_id(entry.record["seq"]), entry.record["sample_index"]] = entry.position


def _replay(result: Recovered, entry: Entry) -> None:
    record = entry.record
    result.standing = result.standing.apply(record)
    if record["type"] not in TYPES:
        result.ledger.apply(record)
    if record["type"] == "published" and record["will_save"]:
        result.captures[record["step"]] = (capture(result.ledger, result.standing), entry.position)
    elif record["type"] == "registered":
        result.captures.clear()
