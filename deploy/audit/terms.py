"""What the audit's bookkeeping is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.audit.payload import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The run's own settings. max_staleness in steps. group_sizes: of data sets that have their own.

    adaptive: lowest and highest bound on staleness where it moves, from max_staleness on; None: it does not.
    greedy: whether groups have one sample more, the greedy answer that is the others' baseline; None: a matter of each data set.
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    greedy: bool | None = None
    adaptive: tuple[int, int] | None = None

    def size_of(self, data_set: str, *, baseline: bool) -> int:
        """Samples of a group."""
        return self.group_sizes.get(data_set, self.group_size) + baseline


@dataclass(kw_only=True, slots=True)
class Group:
    """place: open, planned, trained, or "dropped: reason". samples and has_payload by sample index. baseline: the last one is, and is not trained.

    bound: staleness that was admitted when it was leased first; None: the run's max_staleness.
    """

    first_version: int
    prompt_row: int
    size: int
    place: str = "open"
    samples: dict[int, Sample] = field(default_factory=dict)
    has_payload: set[int] = field(default_factory=set)
    reported: dict[int, int] = field(default_factory=dict)  # tokens of unfinished samples that were reported
    baseline: bool = False
    bound: int | None = None
    extra: int = 0  # samples drawn beyond size

    @property
    def trained(self) -> dict[int, Sample]:
        """Samples that may be trained on."""
        return {index: sample for index, sample in self.samples.items() if sample.usable and not (self.baseline and index == self.size - 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The batch of a step: groups by number in order, and its trained tokens by age as its record says."""

    step: int
    groups: tuple[int, ...]
    tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """A batch whose policy was published."""

    plan: Plan
    version: int
    lineage: int
    where: str
    incarnation: int
