"""The age of a token, worked out again from the records of publications and rollbacks alone (docs/staleness.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Published:
    """One publication. shared: newest step that its history has in common with the present one."""

    version: int
    lineage: int
    step: int
    shared: int


class Publications:
    """All versions that were published, by number."""

    def __init__(self) -> None:
        self.by_number: dict[int, Published] = {}
        self.newest = 0

    def add(self, version: int, lineage: int, step: int, shared: int | None = None) -> None:
        self.by_number[version] = Published(version=version, lineage=lineage, step=step, shared=step if shared is None else shared)
        self.newest = max(self.newest, version)

    def part(self, step: int) -> None:
        """The run went back to a step and will not train the same batches again."""
        for published in self.by_number.values():
            published.shared = min(published.shared, step)

    def age(self, version: int, at_step: int) -> int | None:
        """Steps from the policy that drew a token down to the shared one and up to the one that trains it; None: no such version."""
        published = self.by_number.get(version)
        return None if published is None else published.step + at_step - 2 * published.shared
