"""GDPO: several rewards, each normalised in its group by itself, so that none drowns another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from learner.algorithms.advantages import group_advantages
from learner.algorithms.batch_advantages import whiten
from learner.algorithms.rewards import GroupScores


def several_rewards_advantages(groups: Sequence[GroupScores], *, weights: Mapping[str, float]) -> list[Tensor]:
    """sum over parts of weight * group_advantages(part), then whitened over the batch, float64 [num_usable] a group.

    The batch's mean and deviation are over samples, not tokens; a group that is flat in every part stays exactly 0.
    Source: Liu et al. 2026 (GDPO, arXiv 2601.05242): decoupled normalisation, then normalisation over the batch.
    Raises ValueError when a sample lacks a part.
    """
    sums = [_weighted_sum(group, weights) for group in groups]
    if not sums:
        return []
    whole = torch.cat(sums)
    whitened = whiten(whole, torch.ones_like(whole)).split([part.numel() for part in sums])
    return [part if bool((raw != 0).any()) else torch.zeros_like(part) for part, raw in zip(whitened, sums, strict=True)]


def _weighted_sum(group: GroupScores, weights: Mapping[str, float]) -> Tensor:
    total = torch.zeros_like(group.rewards, dtype=torch.float64)
    for name, weight in weights.items():
        part = group.parts.get(name)
        if part is None or bool(torch.isnan(part).any()):
            raise ValueError(f"reward part {name!r} is missing for some sample; the group has {sorted(group.parts)}: let the scorer give it for every sample")
        total = total + weight * group_advantages(part, normalize=True)
    return total
