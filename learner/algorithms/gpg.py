"""GPG: centred rewards, scaled up for the groups of the batch that carry no signal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.advantages import group_advantages
from learner.algorithms.rewards import GroupScores, has_signal


def gpg_advantages(groups: Sequence[GroupScores]) -> list[Tensor]:
    """alpha (r - group mean), float64 [num_usable] a group, alpha = samples / samples in groups with signal.

    The loss's denominator counts flat groups, whose gradient is 0; alpha takes that dilution back. All flat: exactly 0.
    Source: Chu et al. 2025 (GPG, arXiv 2504.02546), with F_norm = 1.
    """
    alive = sum(group.rewards.numel() for group in groups if has_signal(group.rewards))
    alpha = sum(group.rewards.numel() for group in groups) / alive if alive else 0.0
    return [alpha * group_advantages(group.rewards, normalize=False) for group in groups]
