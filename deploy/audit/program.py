"""One audit from beginning to end, and how it is printed."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.audit import cuts, metrics, payload
from deploy.audit.accounting import ENDED, ONCE, Accounting
from deploy.audit.entry import DAMAGED, Entry
from deploy.audit.findings import Findings, Moved
from deploy.audit.journal import Journal, open_journal
from deploy.audit.payload import group_name
from deploy.audit.terms import Rules

SHOWN_GROUPS = 6
ATTEMPTS = 5  # at a run that goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """How it went. Example: `audit(Path("runs/first")).findings.found == []`"""

    run_dir: Path
    accounting: Accounting
    cuts: list[cuts.Cut]
    findings: Findings


def audit(run_dir: Path) -> Audit:
    """Reads everything in run_dir. Raises ValueError when it is no run folder with a journal, Moved when the run is quicker than we are."""
    for _ in range(ATTEMPTS - 1):
        try:
            return _once(run_dir)
        except Moved:
            continue
    return _once(run_dir)


def _once(run_dir: Path) -> Audit:
    config, findings = _config(run_dir), Findings()
    source = open_journal(run_dir, config)
    beginning, whole = source.beginning()
    try:
        saved, lines = cuts.read_all(run_dir, findings), metrics.read(run_dir, findings)  # first: a run that goes on is behind in them, never ahead
        accounting = Accounting(_rules(config), findings, payload.prompts_of(run_dir), prompts_since=payload.prompts_since(run_dir))
        _follow(run_dir, source, whole, saved, accounting, findings)
    except FileNotFoundError as error:
        raise Moved(str(error.filename)) from None
    if source.beginning()[0] != beginning:
        raise Moved(beginning)
    metrics.check(lines, accounting, findings)
    _check_ends(accounting, findings)
    return Audit(run_dir=run_dir, accounting=accounting, cuts=saved, findings=findings)


def _config(run_dir: Path) -> dict[str, Any]:
    """The run's resolved configuration, which has all that the rules need. Raises ValueError."""
    path = run_dir / "resolved" / "learner.json"
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        _rules(config)
        return config
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error}); give the folder of a run (`headrace audit RUN_DIR`)") from None


def _rules(config: dict[str, Any]) -> Rules:
    sets = config.get("data", {}).get("sets", {})
    own = any(one.get("algorithm") for one in sets.values())
    return Rules(
        groups_per_step=config["groups_per_step"], group_size=config["sampling"]["group_size"], max_staleness=config["staleness"]["max_staleness"],
        group_sizes={name: one["group_size"] for name, one in sets.items() if one.get("group_size")},
        adaptive=(adaptive["lowest"], adaptive["highest"]) if (adaptive := config["staleness"].get("adaptive")) else None,
        greedy=None if own else config.get("algorithm", {}).get("advantage", {}).get("kind") == "greedy_baseline",
    )  # fmt: skip


def _follow(run_dir: Path, source: Journal, whole: bool, saved: list[cuts.Cut], accounting: Accounting, findings: Findings) -> None:
    """Follows the whole journal, comparing each cut where it was made."""
    entries = source.read(findings)
    first = next(entries, None)
    if first is None:
        return
    begin = _beginning(whole, first, saved)
    if begin is not None:
        cuts.begin_with(begin, accounting)
        findings.notes.append(f"the journal begins behind the run's start: its account up to step {begin.step} is taken from {begin.where}")
    elif not whole and cuts.any_marked(run_dir):
        raise Moved("the cut to begin from")
    elif not whole:
        findings.must(False, DAMAGED, first.where, "the journal begins behind the run's start, and there is no cut to begin from")
    due = {cut.position: cut for cut in saved if cut is not begin and cut.position >= first.position}  # an older one that was kept stands alone
    for entry in itertools.chain([first], entries):
        if begin is not None and entry.position <= begin.position:
            accounting.note_before(entry)
            continue
        accounting.follow(entry)
        if (cut := due.pop(entry.position, None)) is not None:
            cuts.compare(cut, accounting, findings)
    for cut in due.values():
        findings.must(False, cuts.AGREES, cut.where, f"the journal has no record at {cut.position}, which it was made after")


def _beginning(whole: bool, first: Entry, saved: list[cuts.Cut]) -> cuts.Cut | None:
    """The cut to begin from; None: the journal tells all, or there is none."""
    if first.record["type"] == "continued":
        position = (first.record["segment"], first.record["offset"])
        found = [cut for cut in saved if cut.position == position and cut.step == first.record["step"]]
        if found:
            return found[0]
    elif whole:
        return None
    return min((cut for cut in saved if cut.position >= first.position), key=lambda cut: cut.position, default=None)


def _check_ends(accounting: Accounting, findings: Findings) -> None:
    """At the end of the journal: where each group is must be where the surviving plans have it, and the totals must balance."""
    times = Counter(seq for plan in accounting.closed.values() for seq in plan.groups)
    for seq, count in times.items():
        findings.must(count == 1, ONCE, "at the end", f"group {group_name(seq)} is trained by {count} steps of the surviving history")
    for seq, group in accounting.groups.items():
        holds = (group.place == "trained") == (seq in times)
        findings.must(holds, ENDED, "at the end", f"group {group_name(seq)} is {group.place}, and surviving steps that trained it: {times[seq]}")
    trained, dropped, still_open = accounting.num_trained, sum(accounting.dropped.values()), accounting.num_open
    findings.must(accounting.next_group == trained + dropped + still_open, metrics.BALANCES, "at the end", f"{accounting.next_group} leased, {trained} trained + {dropped} dropped + {still_open} open")


def table(audit: Audit) -> list[str]:
    """For people: where every group is, what was checked, what was found."""
    accounting, findings = audit.accounting, audit.findings
    still_open = [group_name(seq) for seq, group in accounting.groups.items() if group.place in ("open", "planned")]
    few = " ".join(still_open[:SHOWN_GROUPS]) + (" …" if len(still_open) > SHOWN_GROUPS else "")
    rows = [
        ("groups leased", accounting.next_group, ""),
        ("  trained", accounting.num_trained, f"steps {accounting.step}, lineage {accounting.lineage}"),
        *((f"  dropped: {reason}", count, "") for reason, count in sorted(accounting.dropped.items())),
        ("  open", accounting.num_open, few),
        ("versions", accounting.versions.newest, f"the newest is of step {accounting.step}"),
        ("cuts", len(audit.cuts), " ".join(cut.folder.name for cut in audit.cuts)),
        ("", "", ""),
        *((rule, findings.checked[rule], f"{sum(f.rule == rule for f in findings.found)} broken") for rule in sorted(findings.checked)),
    ]
    lines = [f"{name:<55}{value:>8}  {more}".rstrip() for name, value, more in rows]
    lines += [f"note: {note}" for note in findings.notes] + findings.lines()
    return [*lines, f"{len(findings.found)} findings" if findings.found else "clean"]
