"""What one asks the ledger under, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from learner.gateway.account import Record
from learner.gateway.groups import SampleFacts
from learner.gateway.window import max_open


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """Between which bounds, in steps, the admitted staleness follows the mismatch, and from which values on. Example: Adaptive(lowest=1, highest=4, low=0.01, high=0.05)"""

    lowest: int
    highest: int
    low: float  # of the mismatch
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The rules of one run. Raises ValueError when a batch could never be full (see `window.max_open`).

    groups_per_step P, max_staleness S in steps, window W in groups; group_size: samples of a group.
    min_usable, zero_signal, unscored: see `groups.verdict`. max_attempts: leases of one group before it is dropped("attempts").
    max_flat_a_step: groups dropped for "zero_signal" since the last plan, after which others are kept, or with flat_fails the run ends; None: no bound.
    group_sizes, zero_signals: by data set, where one differs. baselines: data sets whose groups have one sample more, the greedy answer.
    adaptive: how the bound moves, from max_staleness on; None: it does not.
    oversample: samples drawn of each group beyond its size. stop_flat_after: see `groups.early_verdict`.
    max_progress_bytes: of unfinished samples that are kept.
    max_consecutive_drops: groups dropped one after another at which the run still goes on.
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    window: int = 1
    min_usable: int = 2
    zero_signal: bool = False
    unscored: Literal["drop_sample", "drop_group", "fallback"] = "drop_sample"
    max_consecutive_drops: int = 256
    max_attempts: int = 3
    max_flat_a_step: int | None = None
    flat_fails: bool = False
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    zero_signals: Mapping[str, bool] = field(default_factory=dict)
    baselines: frozenset[str] = frozenset()
    adaptive: Adaptive | None = None
    max_progress_bytes: int = 256 << 20
    oversample: int = 0
    stop_flat_after: int | None = None

    def __post_init__(self) -> None:
        assert self.max_open(self.max_staleness if self.adaptive is None else self.adaptive.lowest) >= self.groups_per_step

    def max_open(self, bound: int) -> int:
        """(S + 1) * P - (W - 1), with S the present bound."""
        return max_open(groups_per_step=self.groups_per_step, max_staleness=bound, window=self.window)

    def size_of(self, data_set: str) -> int:
        """Samples of a new group of this data set, the baseline counted in."""
        return self.group_sizes.get(data_set, self.group_size) + (data_set in self.baselines)

    @property
    def largest_group(self) -> int:
        """Samples drawn of the largest group that there may be."""
        return max(self.size_of(name) for name in {"", *self.group_sizes, *self.baselines}) + self.oversample


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The account in numbers: leased = trained + sum(dropped) + open. waiting: open, complete, in no batch."""

    leased: int
    trained: int
    dropped: dict[str, int]
    open: int
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What became of a sample, and of its group.

    group: "open" (samples are missing), "complete" (it waits for a batch), "dropped" (with `reason`), "gone" (it was not there).
    record: to be journaled with the payload; None when nothing changed.
    """

    status: Literal["accepted", "duplicate", "unwanted"]
    group: Literal["open", "complete", "dropped", "gone"]
    reason: str = ""
    record: Record | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """What became of a report of progress. num_tokens: that the account has of the sample. record: to be journaled; None when nothing changed.

    "elsewhere": the account has another number of tokens than those before the report's. "foreign": the lease is not in force, or the tokens
    before the report's are others. "full": max_progress_bytes are kept already.
    """

    status: Literal["accepted", "elsewhere", "foreign", "unwanted", "full"]
    num_tokens: int
    record: Record | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sample of a planned batch. staleness: of its oldest token, in steps. data_set: its name; empty: the run has one without.

    baseline: its reward is what the others of its group are held against; it is not trained on.
    """

    group_id: str
    sample_index: int
    facts: SampleFacts
    staleness: int
    data_set: str = ""
    baseline: bool = False

    @property
    def trains(self) -> bool:
        """Whether it may be trained on."""
        return self.facts.usable and not self.baseline
