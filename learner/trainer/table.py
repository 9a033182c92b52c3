"""The table of a batch: what every rank knows of every sample, and all that follows from it alone.

Advantages, global counts and the cut into minibatches are computed from the table on every rank, so they are identical
everywhere without a collective, whatever rank holds which payload.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from learner.algorithms.advantages import group_advantages, has_signal

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

    @property
    def id(self) -> SampleId:
        return self.group_id, self.sample_index


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
    counts: Counts  # of all usable samples, those of advantage 0 as well


def groups_of(table: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by group, groups and entries in table order."""
    groups: dict[str, list[Entry]] = {}
    for entry in table:
        groups.setdefault(entry.group_id, []).append(entry)
    return groups


def cut(table: Sequence[Entry], *, num_minibatches: int, normalize: bool) -> list[Minibatch]:
    """The batch as minibatches of whole groups, as equal in number as they can be, in table order."""
    groups = list(groups_of(table).values())
    bounds = [round(i * len(groups) / num_minibatches) for i in range(num_minibatches + 1)]
    return [_minibatch(groups[start:end], normalize) for start, end in itertools.pairwise(bounds)]


def _minibatch(groups: Sequence[Sequence[Entry]], normalize: bool) -> Minibatch:
    usable = [entry for group in groups for entry in group if entry.usable and entry.num_trained_tokens]
    advantages: dict[SampleId, float] = {}
    for group in groups:
        advantages.update(_advantages([entry for entry in group if entry.usable], normalize))
    trained = {entry.id: advantages[entry.id] for entry in usable if advantages[entry.id] != 0.0}
    return Minibatch(advantages=trained, counts=Counts(num_tokens=sum(e.num_trained_tokens for e in usable), num_sequences=len(usable)))


def _advantages(usable: Sequence[Entry], normalize: bool) -> dict[SampleId, float]:
    if not usable:
        return {}
    rewards = [entry.reward for entry in usable]
    values = group_advantages(torch.tensor(rewards, dtype=torch.float64), normalize=normalize).tolist()
    return {entry.id: value for entry, value in zip(usable, values, strict=True)}


def zero_signal_share(table: Sequence[Entry]) -> float:
    """Share of groups whose usable rewards do not spread; 0 for an empty table."""
    rewards = [[entry.reward for entry in group if entry.usable] for group in groups_of(table).values()]
    flat = sum(1 for group in rewards if not group or not has_signal(torch.tensor(group, dtype=torch.float64)))
    return flat / len(rewards) if rewards else 0.0
