"""Follows the records of held-out evaluations with a bookkeeping of its own: their samples are apart from training's, and balance as well."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from deploy.audit.entry import Entry
from deploy.audit.findings import Findings
from deploy.audit.versions import Publications

ORDER, ONCE, DRAWN, BALANCED, TOLD = (
    "evaluations run one after another", "an evaluation's sample is booked once, of a prompt that was lent", "an evaluation is drawn from the version it asks for or a newer one",
    "an evaluation's samples balance", "evaluations in metrics match the journal",
)  # fmt: skip
COUNTS = ("wanted", "leased", "scored", "unscored", "lost")


@dataclass(kw_only=True, slots=True)
class Running:
    """The one that runs. samples: by prompt, index to whether it has a score."""

    serial: int
    step: int
    version: int
    num_prompts: int
    group_size: int
    lent: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    samples: dict[int, dict[int, bool]] = field(default_factory=dict)


class Evaluations:
    """`follow` every record whose type begins with "evaluation_"; `told` compares a line of metrics.jsonl."""

    def __init__(self, findings: Findings, versions: Publications) -> None:
        self._findings, self._versions = findings, versions
        self.running: Running | None = None
        self.next_serial = 0
        self.ended: dict[tuple[int, int], list[dict[str, Any]]] = {}  # results by (step, version)
        self.whole = True  # whether the journal tells of all of them

    def begin_with(self, state: dict[str, Any]) -> None:
        """Takes over what the journal forgot: what the oldest cut says."""
        self.next_serial, self.whole = state["next_serial"], False
        if saved := state["current"]:
            self.running = Running(
                serial=saved["serial"], step=saved["step"], version=saved["version"], num_prompts=saved["num_prompts"], group_size=saved["num_samples"] + saved["greedy"],
                lent=set(saved["lent"]), lost={group for group, _ in saved["lost"]},
            )  # fmt: skip
            for group, index, answer in saved["answers"]:
                self.running.samples.setdefault(group, {})[index] = answer[0] is not None

    def follow(self, record: dict[str, Any], entry: Entry) -> bool:
        """False for a type that is not known. Raises KeyError or TypeError for a record that lacks something."""
        kind = record["type"]
        if kind == "evaluation_begun":
            self._begun(record, entry)
            return True
        running = self.running
        if not self._must(running is not None and running.serial == record["serial"], ORDER, entry, f"{kind} of evaluation {record['serial']}, but {running.serial if running else 'none'} runs") or running is None:
            return True
        match kind:
            case "evaluation_lent":
                self._lent(running, record["groups"], entry)
            case "evaluation_answered":
                self._answered(running, record, entry)
            case "evaluation_lost":
                self._must(running.lent.issuperset(record["groups"]), ONCE, entry, f"prompts {record['groups']} are lost, lent are {sorted(running.lent)[:5]} …")
                running.lost.update(record["groups"])
            case "evaluation_ended":
                self._ended(running, record, entry)
            case _:
                return False
        return True

    def told(self, line: dict[str, Any], where: str) -> None:
        """A line of metrics.jsonl: it balances, and the journal has it, unless it was written and the gateway died before its record."""
        found = line["evaluation"]
        balance = found["scored"] + found["unscored"] + found["lost"]
        self._findings.must(found["leased"] == balance <= found["wanted"], BALANCED, where, f"evaluation of step {line['step']}: {found['leased']} leased, {balance} scored, unscored and lost, {found['wanted']} wanted")
        results = self.ended.get((line["step"], line["version"]), [])
        still = self.running is not None and (self.running.step, self.running.version) == (line["step"], line["version"])
        own = [[result[name] for name in COUNTS] for result in results]
        same = [found[name] for name in COUNTS] in own
        self._findings.must(same or still or (not self.whole and not results), TOLD, where, f"evaluation of step {line['step']}, version {line['version']}: {[found[name] for name in COUNTS]} {'/'.join(COUNTS)}, in the journal {own or 'none'}")

    def _must(self, holds: bool, rule: str, entry: Entry, what: str) -> bool:
        return self._findings.must(holds, rule, entry.where, what)

    def _begun(self, record: dict[str, Any], entry: Entry) -> None:
        serial, version = record["serial"], record["version"]
        self._must(self.running is None and serial == self.next_serial, ORDER, entry, f"evaluation {serial} begins, {self.next_serial} is due and {self.running.serial if self.running else 'none'} runs")
        known = self._versions.by_number.get(version)
        self._must(version == self._versions.newest and known is not None and known.step == record["step"], DRAWN, entry, f"evaluation {serial} is of step {record['step']}, version {version}; the newest published is {self._versions.newest}")
        self.running = Running(serial=serial, step=record["step"], version=version, num_prompts=record["num_prompts"], group_size=record["num_samples"] + record["greedy"])
        self.next_serial = serial + 1

    def _lent(self, running: Running, groups: list[int], entry: Entry) -> None:
        for group in groups:
            self._must(0 <= group < running.num_prompts and group not in running.lent, ONCE, entry, f"prompt {group} of {running.num_prompts} is lent for the first time{' again' if group in running.lent else ''}")
            running.lent.add(group)

    def _answered(self, running: Running, record: dict[str, Any], entry: Entry) -> None:
        group, index = record["group"], record["sample"]
        score, _, _, _, tokens = record["answer"]
        samples = running.samples.setdefault(group, {})
        wanted = group in running.lent and group not in running.lost and 0 <= index < running.group_size and index not in samples
        self._must(wanted, ONCE, entry, f"sample {index} of prompt {group} is booked; booked are {sorted(samples)}, lent: {group in running.lent}, lost: {group in running.lost}")
        for version, _ in tokens:
            self._must(running.version <= version <= self._versions.newest, DRAWN, entry, f"sample {index} of prompt {group}: drawn by version {version}, asked was {running.version} or newer, the newest is {self._versions.newest}")
        samples[index] = score is not None

    def _ended(self, running: Running, record: dict[str, Any], entry: Entry) -> None:
        if (result := record["result"]) is not None:
            self.ended.setdefault((running.step, running.version), []).append(result)
            tally = Counter(scored for samples in running.samples.values() for scored in samples.values())
            leased = len(running.lent) * running.group_size
            own = [running.num_prompts * running.group_size, leased, tally[True], tally[False], leased - tally.total()]
            said = [result[name] for name in COUNTS]
            self._must(said == own, BALANCED, entry, f"evaluation {running.serial} ended with {said} {'/'.join(COUNTS)}, by its records {own}")
        self.running = None
