"""Cuts as they lie on the disk: `RUN_DIR/checkpoints/step-NNNNNN/` with cut.json, ledger.msgpack and the trainer's files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from deploy.audit import kept, tensors
from deploy.audit.accounting import Accounting
from deploy.audit.findings import Findings
from deploy.audit.payload import group_name, of_record
from deploy.audit.terms import Group, Plan

WHOLE, AGREES = "a cut is whole", "a cut's account is what the journal made"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One marked cut. position: (segment, offset) of the last record that its account holds.

    state: ledger.msgpack's account. payloads: of payloads.bin, by (number of the group, sample index).
    """

    folder: Path
    step: int
    lineage: int
    position: tuple[int, int]
    state: dict[str, Any]
    payloads: dict[tuple[int, int], bytes]
    evaluations: dict[str, Any] | None  # None: a cut of before there were any

    @property
    def where(self) -> str:
        return f"checkpoints/{self.folder.name}"


def read_all(run_dir: Path, findings: Findings) -> list[Cut]:
    """Every marked cut, oldest step first; what is broken in one is a finding."""
    folders = sorted(path.parent for path in (run_dir / "checkpoints").glob("step-*/cut.json") if path.parent.name[5:].isdigit())
    found = (_read(folder, findings) for folder in folders)
    return sorted((cut for cut in found if cut), key=lambda cut: cut.step)


def any_marked(run_dir: Path) -> bool:
    """Whether there is a cut now."""
    return any((run_dir / "checkpoints").glob("step-*/cut.json"))


def _read(folder: Path, findings: Findings) -> Cut | None:
    where = f"checkpoints/{folder.name}"
    try:
        mark = json.loads((folder / "cut.json").read_bytes())
        state = msgpack.unpackb((folder / "ledger.msgpack").read_bytes(), strict_map_key=False)
        cut = Cut(folder=folder, step=int(mark["policy_step"]), lineage=int(mark["lineage"]), position=(int(mark["segment"]), int(mark["offset"])), state=state["account"], payloads=kept.payloads(folder / "payloads.bin"), evaluations=state.get("evaluations"))
        findings.must(mark["schema"] == 1 and state["schema"] == 1, WHOLE, where, f"schemas {mark['schema']} (cut.json) and {state['schema']} (ledger.msgpack), 1 is known")
    except (OSError, KeyError, TypeError, ValueError) as error:
        if not (folder / "cut.json").is_file():
            return None
        findings.must(False, WHOLE, where, f"cut.json, ledger.msgpack or payloads.bin cannot be read: {type(error).__name__}: {error}")
        return None
    complaints = [*kept.complaints(folder, mark["files"]), *tensors.complaints(folder)]
    if not (folder / "cut.json").is_file():
        return None  # a run that goes on has let go of it meanwhile
    findings.must(cut.step == int(folder.name[5:]), WHOLE, where, f"its marker says step {cut.step}")
    needed = {(saved["seq"], index) for saved in cut.state["groups"] if saved["place"] != "closed" for index, _ in saved["samples"]}
    findings.must(cut.payloads.keys() == needed, WHOLE, where, f"its payloads are of {len(cut.payloads)} samples, its open groups have {len(needed)}")
    for complaint in complaints:
        findings.must(False, WHOLE, where, complaint)
    findings.checked[WHOLE] += 1
    return cut


def begin_with(cut: Cut, accounting: Accounting) -> None:
    """Takes over what the journal forgot: the account of the oldest cut, as its file has it."""
    state = cut.state
    for version, lineage, step, shared in state["versions"]["known"]:
        accounting.versions.add(version, lineage, step, shared)
    accounting.versions.newest = state["versions"]["last"]
    accounting.step, accounting.lineage, accounting.next_group, accounting.published = state["step"], state["lineage"], state["next_seq"], state["published"]
    for saved in state["groups"]:
        samples = {index: of_record({"facts": facts}) for index, facts in saved["samples"]}
        place = "trained" if saved["place"] == "closed" else saved["place"]
        accounting.groups[saved["seq"]] = Group(first_version=saved["first_version"], prompt_row=saved["prompt_row"], size=saved.get("size", state["group_size"]), baseline=saved.get("baseline", False), bound=saved.get("bound"), extra=saved.get("extra", 0), place=place, samples=samples, reported={index: len(part["ids"]) // 4 for index, part in saved.get("parts", ())})
    accounting.closed, accounting.due = _plans(state["closed"]), _plans(state["replays"])
    accounting.active = next(iter(_plans([state["active"]] if state["active"] else []).values()), None)
    accounting.bounds = dict(state.get("bounds", []))
    accounting.dropped.update(state["dropped"])
    accounting.first_told = accounting.versions.newest + 1
    if cut.evaluations is not None:
        accounting.evaluations.begin_with(cut.evaluations)
    for (seq, index), data in cut.payloads.items():
        accounting.note_payload(seq, index, data, None, f"{cut.where}/payloads.bin")
    accounting.num_trained_before = state["num_trained"] - sum(len(plan.groups) for plan in accounting.closed.values())


def _plans(states: list[Any]) -> dict[int, Plan]:

    return {step: Plan(step=step, groups=tuple(groups), tokens=tuple((age, count) for age, count in tokens)) for step, groups, tokens in states}


def compare(cut: Cut, accounting: Accounting, findings: Findings) -> None:
    """When the accounting has just followed the record that the cut was made after: both must say the same."""
    state = cut.state
    fits = accounting.announced.get(cut.position) == (cut.step, cut.lineage)
    findings.must(fits, AGREES, cut.where, f"the record at {cut.position} did not announce a cut of step {cut.step}, lineage {cut.lineage}")
    pairs = {
        "step": (state["step"], accounting.step),
        "lineage": (state["lineage"], accounting.lineage),
        "groups leased": (state["next_seq"], accounting.next_group),
        "groups trained": (state["num_trained"], accounting.num_trained),
        "groups dropped": (dict(state["dropped"]), dict(accounting.dropped)),
        "next evaluation": (cut.evaluations["next_serial"] if cut.evaluations else 0, accounting.evaluations.next_serial),
        "staleness bound": (dict(state.get("bounds", [])).get(cut.step), accounting.bounds.get(cut.step)),
        "newest version": (state["versions"]["last"], accounting.versions.newest),
    }
    for what, (saved, own) in pairs.items():
        findings.must(saved == own, AGREES, cut.where, f"{what}: the cut has {saved}, the journal makes it {own}")
    saved_open = {saved["seq"]: sorted(index for index, _ in saved["samples"]) for saved in state["groups"] if saved["place"] != "closed"}
    own_open = {seq: sorted(group.samples) for seq, group in accounting.groups.items() if group.place in ("open", "planned")}
    for seq in sorted(saved_open.keys() | own_open.keys()):
        findings.must(saved_open.get(seq) == own_open.get(seq), AGREES, cut.where, f"group {group_name(seq)}, open: the cut has samples {saved_open.get(seq)}, the journal {own_open.get(seq)}")
