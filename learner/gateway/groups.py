"""One group: its samples, its lease, and whether it is worth training on."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from learner.gateway.parts import Part

ZERO_SIGNAL_SPREAD = 1e-6
UNSCORED = "unscored"
ENVIRONMENT = "environment_"  # what begins so failed where the sample was played, and so has no reward either
FLAT_EARLY = "flat_early"
NAMES_KEPT = 4096  # names and numbers of groups that need not be made again for each sample

Place = Literal["open", "planned", "closed"]


@functools.lru_cache(NAMES_KEPT)
def group_id(seq: int) -> str:
    """Name of the group with this sequence number: unique in a run, sorts in order of first lease."""
    return f"g{seq:08d}"


@functools.lru_cache(NAMES_KEPT)
def seq_of(name: str) -> int | None:
    """Sequence number of a group's name; None when it is no such name."""
    digits = name[1:]
    if name[:1] == "g" and digits.isascii() and digits.isdigit() and group_id(int(digits)) == name:
        return int(digits)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """What the account knows of a finished sample; the payload stays in the journal.

    For instance SampleFacts(reward=1.0, num_prompt_tokens=12, num_completion_tokens=3, num_trained_tokens=3, spans=((1, 3),)).
    reward: finite, or None when there is no score (then it is unusable and unusable_reason says why).
    unusable_reason: empty when it may be trained on; begins with "unscored" when the scorer had no answer.
    num_prompt_tokens, num_completion_tokens: over all its strands. num_trained_tokens: completion tokens with loss mask 1.
    spans: (version number, tokens with loss mask 1 that it drew), in order, one pair for each span; they sum to num_trained_tokens. Empty
    only for a sample that failed before its first token.
    num_strands: contexts that it was drawn in. num_turns: answers of the policy.
    """

    reward: float | None
    unusable_reason: str = ""
    num_prompt_tokens: int
    num_completion_tokens: int
    num_trained_tokens: int
    spans: tuple[tuple[int, int], ...]
    truncated: bool = False
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    replica_id: str = ""
    num_strands: int = 1
    num_turns: int = 1

    def __post_init__(self) -> None:
        if self.reward is None and not self.unusable_reason:
            raise ValueError("a sample without a reward must say in unusable_reason why it has none")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not finite; send it as unscored")
        if not 0 <= self.num_trained_tokens <= self.num_completion_tokens:
            raise ValueError(f"num_trained_tokens={self.num_trained_tokens} is outside [0, num_completion_tokens={self.num_completion_tokens}]")
        if bool(self.spans) != bool(self.num_completion_tokens) or (self.usable and not self.spans) or sum([count for _, count in self.spans]) != self.num_trained_tokens:
            raise ValueError(f"version spans {self.spans} do not sum to num_trained_tokens={self.num_trained_tokens}")

    @property
    def usable(self) -> bool:
        return not self.unusable_reason

    def to_record(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "unusable_reason": self.unusable_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_completion_tokens": self.num_completion_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "truncated": self.truncated,
            "replica_id": self.replica_id,
            "num_strands": self.num_strands,
            "num_turns": self.num_turns,
            "spans": [list(span) for span in self.spans],
            "reward_parts": dict(self.reward_parts),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SampleFacts:
        return cls(**{**record, "spans": tuple((version, count) for version, count in record["spans"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The loan of one group. lapse_at: seconds of the wall clock, since it outlives this process."""

    lease_id: str
    holder: str
    lapse_at: float


@dataclass(kw_only=True, slots=True)
class Group:
    """One group of the account. Only `Account.apply` changes it.

    prompt_row: row of the prompt in its PromptSet. opened_at: wall-clock seconds of the first lease.
    first_version: least version of the first lease; no token of it may be older.
    floor_step: policy step at the first lease; it is not leased again while the run is rolled back below that.
    attempts: leases that count (one given back in good order does not).
    data_set: name of the prompt's data set; empty: the run has one without a name. size: samples of the group, the baseline counted in.
    extra: samples that are drawn beyond size; the group is complete with the first `size` of all.
    bound: staleness that it was opened under, in steps; None: the run's max_staleness.
    baseline: the last sample is the greedy answer, whose reward the others are held against; it is never trained on.
    parts: what was reported of samples that are not submitted, by sample index.
    rolled_back: it was open in a rollback, so its age may break the bound without a defect.
    """

    seq: int
    prompt_id: str
    prompt_row: int
    opened_at: float
    first_version: int
    floor_step: int
    size: int
    data_set: str = ""
    attempts: int = 0
    lease: Lease | None = None
    samples: dict[int, SampleFacts] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    place: Place = "open"
    rolled_back: bool = False
    baseline: bool = False
    bound: int | None = None
    extra: int = 0

    @property
    def complete(self) -> bool:
        return len(self.samples) >= self.size

    @property
    def num_drawn(self) -> int:
        """Samples that its holder draws."""
        return self.size + self.extra

    @property
    def group_id(self) -> str:
        return group_id(self.seq)

    @property
    def baseline_index(self) -> int | None:
        """Sample index of the greedy answer; None where the group has none."""
        return self.size - 1 if self.baseline else None

    def usable(self) -> list[SampleFacts]:
        """What can be trained on, by index: the baseline is not among it."""
        return [facts for index, facts in sorted(self.samples.items()) if facts.usable and index != self.baseline_index]

    def to_state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in _PLAIN_GROUP}
        state["lease"] = asdict(self.lease) if self.lease else None
        state["samples"] = [[index, facts.to_record()] for index, facts in self.samples.items()]
        if self.parts:
            state["parts"] = [[index, part.to_record()] for index, part in self.parts.items()]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Group:
        lease = Lease(**state["lease"]) if state["lease"] else None
        samples = {index: SampleFacts.from_record(record) for index, record in state["samples"]}
        parts = {index: Part.from_record(record) for index, record in state.get("parts", ())}
        return cls(**{**state, "lease": lease, "samples": samples, "parts": parts})


_PLAIN_GROUP = tuple(entry.name for entry in fields(Group) if entry.name not in ("lease", "samples", "parts"))


def verdict(samples: Mapping[int, SampleFacts], *, min_usable: int, zero_signal: bool, unscored: str, baseline_index: int | None = None) -> str:
    """Why a complete group is not trained on; empty when it is. baseline_index: of the greedy answer, which no count and no spread here holds.

    "no_baseline": the greedy answer has no score, or is unusable. "unscored": the scorer had no answer for a sample and such groups are dropped whole. "unusable": fewer usable samples than min_usable.
    "zero_signal": the rewards of the usable samples spread over less than 1e-6 (the spread, not the mean: four rewards of 0.4 teach
    nothing, and float noise is no signal).
    """
    trained = {index: facts for index, facts in samples.items() if index != baseline_index}
    usable = [facts.reward for facts in trained.values() if facts.usable and facts.reward is not None]
    if baseline_index is not None and not samples[baseline_index].usable:
        return "no_baseline"
    if unscored == "drop_group" and any(facts.unusable_reason.startswith(UNSCORED) for facts in trained.values()):
        return "unscored"
    if len(usable) < min_usable:
        return "unusable"
    if zero_signal and max(usable) - min(usable) < ZERO_SIGNAL_SPREAD:
        return "zero_signal"
    return ""


def early_verdict(
    samples: Mapping[int, SampleFacts], *, size: int, min_usable: int, zero_signal: bool, unscored: str, stop_flat_after: int | None, baseline_index: int | None = None
) -> str:
    """Why a group that is not complete will not be trained on, whatever becomes of its other samples; empty while that is open.

    size: samples that will complete it. Reasons as in `verdict`; and "flat_early": with zero_signal the first stop_flat_after usable samples have
    equal rewards, which is a guess about the rest, and asked for. Example: of 4 samples with min_usable=2, three unusable ones: "unusable".
    """
    trained = {index: facts for index, facts in samples.items() if index != baseline_index}
    rewards = [facts.reward for facts in trained.values() if facts.usable and facts.reward is not None]
    if baseline_index is not None and baseline_index in samples and not samples[baseline_index].usable:
        return "no_baseline"
    if unscored == "drop_group" and any(facts.unusable_reason.startswith(UNSCORED) for facts in trained.values()):
        return "unscored"
    missing = size - len(samples) - (baseline_index is not None and baseline_index not in samples)
    if len(rewards) + missing < min_usable:
        return "unusable"
    if zero_signal and stop_flat_after is not None and len(rewards) >= stop_flat_after and max(rewards) - min(rewards) < ZERO_SIGNAL_SPREAD:
        return FLAT_EARLY
    return ""
