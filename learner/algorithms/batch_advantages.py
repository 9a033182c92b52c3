"""REINFORCE++: advantages normalised over the whole batch, with or without the group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.rewards import GroupScores, checked_rewards, has_signal


def batch_advantages(groups: Sequence[GroupScores], *, group_baseline: bool) -> list[Tensor]:
    """(a - mean(a)) / std(a) over all trained tokens of the batch, float64 [num_usable] a group.

    a is the reward, or with `group_baseline` the reward minus its group's mean. Every token of a sample carries its a, so mean
    and (population) standard deviation weigh a sample by its trained tokens. A batch whose a spreads less than
    SPREAD_TOLERANCE gives exactly 0; with group_baseline so does a group without spread, whatever the batch's mean.
    Source: Hu et al. 2025 (REINFORCE++, arXiv 2501.03262), the global advantage normalisation and the baseline variant.
    """
    if not groups:
        return []
    values = [checked_rewards(group.rewards) for group in groups]
    if group_baseline:
        values = [group - group.mean() if has_signal(group) else torch.zeros_like(group) for group in values]
    whitened = whiten(torch.cat(values), torch.cat([group.num_tokens for group in groups]))
    parts = list(whitened.split([group.numel() for group in values]))
    if group_baseline:
        return [part if has_signal(group.rewards) else torch.zeros_like(part) for part, group in zip(parts, groups, strict=True)]
    return parts


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """(v - mean) / std with weighted mean and population deviation, [n], float64; exactly 0 without spread or weight.

    Args: values [n]; weights [n], not negative.
    """
    weighted = values[weights > 0]
    if weighted.numel() == 0 or not has_signal(weighted):
        return torch.zeros_like(values, dtype=torch.float64)
    share = weights.to(torch.float64) / weights.sum()
    centred = values.to(torch.float64) - (share * values).sum()
    return centred / (share * centred.square()).sum().sqrt()
