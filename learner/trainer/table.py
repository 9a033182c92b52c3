"""The table of a batch: what every rank knows of every sample, and all that follows from it alone.

Advantages, global counts and the cut into minibatches are computed from the table on every rank, so they are identical
everywhere without a collective, whatever rank holds which payload.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from learner.algorithms.rewards import has_signal

SampleId = tuple[str, int]  # (group_id, sample_index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One sample of the batch.

    Example: Entry(group_id="g7", sample_index=0, reward=1.0, usable=True, num_prompt_tokens=36, num_completion_tokens=8,
    num_trained_tokens=8, staleness=1, owner=0, truncated=False, num_versions=1)
    """

    group_id: str
    sample_index: int
    reward: float  # finite where usable
    usable: bool
    num_prompt_tokens: int
    num_completion_tokens: int
    num_trained_tokens: int  # completion tokens with loss mask 1
    staleness: int  # of its oldest token, in steps
    owner: int  # rank that holds the payload
    truncated: bool
    num_versions: int
    unusable_reason: str = ""  # empty where usable
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    data_set: str = ""  # name of the prompt's; empty: the run has one without
    num_strands: int = 1  # contexts that it was drawn in; numbers of tokens are over all of them
    num_turns: int = 1  # answers of the policy
    baseline: Entry | None = None  # greedy answer to its prompt, in no table itself; None: the group has none

    @property
    def id(self) -> SampleId:
        return self.group_id, self.sample_index

    @property
    def num_drawn_tokens(self) -> int:
        """Length of the policy's own words. Between turns lies what an environment said, with loss mask 0; a sample of one turn has none of it."""
        return self.num_trained_tokens if self.num_turns > 1 else self.num_completion_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Denominators of one minibatch over all ranks: usable samples only. Example: Counts(num_tokens=512, num_sequences=64)"""

    num_tokens: int  # trained tokens
    num_sequences: int  # samples with at least one trained token


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """Part of a batch that makes one optimizer update.

    Example: Minibatch(advantages={("g7", 0): 1.0, ("g7", 1): -1.0}, counts=Counts(num_tokens=16, num_sequences=2))
    """

    advantages: Mapping[SampleId, float]  # samples whose gradient is not zero by construction
    counts: Counts  # of all usable samples that are trained on, those of advantage 0 as well
    staleness: Mapping[SampleId, int] = field(default_factory=dict)  # of the oldest token of each sample in `advantages`
    data_sets: Mapping[SampleId, str] = field(default_factory=dict)  # of each sample in `advantages`


def groups_of(table: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by group, groups and entries in table order."""
    groups: dict[str, list[Entry]] = {}
    for entry in table:
        groups.setdefault(entry.group_id, []).append(entry)
    return groups


def nobody(entry: Entry) -> bool:
    """False for every sample."""
    return False


def cut(
    table: Sequence[Entry], advantages: Mapping[SampleId, float], *, num_minibatches: int, trains_all: Callable[[Entry], bool] = nobody, masks: Callable[[Entry], bool] = nobody
) -> list[Minibatch]:
    """The batch as minibatches of whole groups, as equal in number as they can be, in table order.

    Samples of advantage 0 are left to the denominators, unless trains_all says that they have a gradient too. Samples that `masks` names are
    in neither. The counts are over all data sets: a token weighs the same wherever it comes from.
    """
    groups = list(groups_of(table).values())
    bounds = [round(i * len(groups) / num_minibatches) for i in range(num_minibatches + 1)]
    parts = [[entry for group in groups[start:end] for entry in group] for start, end in itertools.pairwise(bounds)]
    return [_minibatch([e for e in part if e.usable and e.num_trained_tokens and not masks(e)], advantages, trains_all) for part in parts]


def _minibatch(usable: Sequence[Entry], advantages: Mapping[SampleId, float], trains_all: Callable[[Entry], bool]) -> Minibatch:
    trained = [entry for entry in usable if advantages[entry.id] != 0.0 or trains_all(entry)]
    return Minibatch(
        advantages={entry.id: advantages[entry.id] for entry in trained},
        counts=Counts(num_tokens=sum(entry.num_trained_tokens for entry in usable), num_sequences=len(usable)),
        staleness={entry.id: entry.staleness for entry in trained},
        data_sets={entry.id: entry.data_set for entry in trained},
    )


def zero_signal_share(table: Sequence[Entry]) -> float:
    """Share of groups whose usable rewards do not spread (with a baseline: all equal it); 0 for an empty table."""
    rewards = [[value for entry in group if entry.usable for value in _with_baseline(entry)] for group in groups_of(table).values()]
    flat = sum(1 for group in rewards if not group or not has_signal(torch.tensor(group, dtype=torch.float64)))
    return flat / len(rewards) if rewards else 0.0


def _with_baseline(entry: Entry) -> tuple[float, ...]:
    return (entry.reward,) if entry.baseline is None else (entry.reward, entry.baseline.reward)
