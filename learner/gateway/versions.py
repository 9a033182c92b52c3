"""Policy versions and the age of a token: the only place where version arithmetic is written (docs/staleness.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any


class StalenessBroken(AssertionError):
    """A group past the bound reached a batch: a defect of the account, never of the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """One published policy. For instance number 7, lineage 1, step 3: the seventh publication, step 3 after one rollback.

    number: from 1, strictly increasing over the whole run, never used twice.
    lineage: rollbacks before it.
    step: closed steps before it in its lineage.
    branch: newest step that its history and the present one share; equal to step unless a rollback left it behind for good.
    """

    number: int
    lineage: int
    step: int
    branch: int


def staleness(*, at_step: int, step: int, branch: int) -> int:
    """Age in steps of a token drawn at `step`, trained in the step that starts from policy `at_step`.

    (step - branch) + (at_step - branch): the way down from the drawing policy to the last one that both histories share, and up
    to the training one. In one history branch = step, so it is at_step - step; after a rollback to cut c that was not replayed,
    branch = c and it is (step - c) + (at_step - c).
    Raises StalenessBroken for a token of the future, which would make every bound inert.
    """
    if not branch <= step or not branch <= at_step:
        raise StalenessBroken(f"a token drawn at step {step} (shared history up to {branch}) cannot be trained at the older step {at_step}")
    return (step - branch) + (at_step - branch)


class Versions:
    """The published versions that some token may still name, by number."""

    def __init__(self, versions: Iterable[PolicyVersion] = (), last_number: int = 0) -> None:
        self._by_number = {version.number: version for version in versions}
        self.last_number = last_number

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __iter__(self) -> Iterator[PolicyVersion]:
        return iter(self._by_number.values())

    def __getitem__(self, number: int) -> PolicyVersion:
        return self._by_number[number]

    @property
    def newest(self) -> PolicyVersion | None:
        """The last one published, of whatever lineage; None before the first."""
        return self._by_number.get(self.last_number)

    def add(self, version: PolicyVersion) -> None:
        """Publishes; numbers only rise."""
        assert version.number > self.last_number, f"version {version.number} after {self.last_number}: numbers are never used twice"
        self._by_number[version.number] = version
        self.last_number = version.number

    def skip(self, count: int) -> None:
        """Leaves out numbers that may have been used without this account knowing."""
        self.last_number += count

    def leave(self, cut: int) -> None:
        """A rollback to `cut` whose plans will not be replayed: what was drawn past it belongs to another history."""
        self._by_number = {n: replace(v, branch=min(v.branch, cut)) for n, v in self._by_number.items()}

    def forget(self, before: int) -> None:
        """Removes numbers below `before`, but never the newest."""
        self._by_number = {n: v for n, v in self._by_number.items() if n >= before or n == self.last_number}

    def age(self, number: int, at_step: int) -> int:
        """Staleness at `at_step` of a token that version `number` drew."""
        version = self._by_number[number]
        return staleness(at_step=at_step, step=version.step, branch=version.branch)

    def state(self) -> dict[str, Any]:
        """Msgpack-able; `Versions.from_state` makes an equal one."""
        return {"last": self.last_number, "known": [[v.number, v.lineage, v.step, v.branch] for v in self._by_number.values()]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Versions:
        known = (PolicyVersion(number=n, lineage=lineage, step=step, branch=branch) for n, lineage, step, branch in state["known"])
        return cls(known, state["last"])
