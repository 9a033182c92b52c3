"""What an audit found: one line each, naming where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LISTED_PER_RULE = 20  # one lost record may break a rule for every group after it


class Moved(ValueError):
    """The run went on and let go of something while it was being read."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: was removed while it was being read; the run goes on and has let go of it, so audit again")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One broken rule. Example: Finding(rule="trained twice", where="journal/000000000000.log at 8812", what="group g00000004 …")"""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.what}"


@dataclass(kw_only=True, slots=True)
class Findings:
    """All of them in order, and what was looked at: name of a check to how often it was made."""

    found: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)  # worth knowing, nothing wrong

    def must(self, holds: bool, rule: str, where: str, what: str) -> bool:
        """Counts a check; where it does not hold, it is a finding. Returns whether it holds."""
        self.checked[rule] += 1
        if not holds:
            self.found.append(Finding(rule=rule, where=where, what=what))
        return holds

    def lines(self) -> list[str]:
        """For people: at most LISTED_PER_RULE of one rule, and how many more."""
        seen: Counter[str] = Counter()
        lines = []
        for finding in self.found:
            seen[finding.rule] += 1
            if seen[finding.rule] <= LISTED_PER_RULE:
                lines.append(str(finding))
        return lines + [f"{rule}: and {count - LISTED_PER_RULE} more" for rule, count in seen.items() if count > LISTED_PER_RULE]
