"""Deltas that are kept for those who come a little late: a bounded chain of steps from version to version, of one layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protos.manifest.v1alpha1 import manifest_pb2

MAX_STEPS = 8  # longest chain that is offered


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Example: Step(from_version=6, to_version=7, parts=[DeltaPart(...)])"""

    from_version: int
    to_version: int
    parts: Sequence[manifest_pb2.DeltaPart]

    @property
    def num_bytes(self) -> int:
        return sum(len(part.data) for part in self.parts)


class History:
    """The newest steps. A step that does not follow the last one begins anew, and so does another layout."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self._layout = 0

    def add(self, step: Step, *, layout: int, total_bytes: int) -> None:
        """total_bytes: of a version. Of what is kept, no chain from its oldest step on is larger than half a version."""
        if layout != self._layout or (self._steps and self._steps[-1].to_version != step.from_version):
            self._steps.clear()
        self._layout = layout
        self._steps.append(step)
        while self._steps and 2 * sum(kept.num_bytes for kept in self._steps) > total_bytes:
            self._steps.popleft()

    def chain(self, *, have_version: int, layout: int, version: int) -> list[Step]:
        """The steps from one version to the other; empty where they are not all kept, or the layout is another."""
        steps = list(self._steps)
        start = next((index for index, step in enumerate(steps) if step.from_version == have_version), None)
        if not have_version or start is None or layout != self._layout or steps[-1].to_version != version:
            return []
        return steps[start:]

    def clear(self) -> None:
        self._steps.clear()


def plan_of(steps: Sequence[Step]) -> manifest_pb2.DeltaPlan:
    """What announces a chain."""
    return manifest_pb2.DeltaPlan(
        steps=[manifest_pb2.DeltaStep(from_version=step.from_version, to_version=step.to_version, num_parts=len(step.parts)) for step in steps]
    )  # fmt: skip
