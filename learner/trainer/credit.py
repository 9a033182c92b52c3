"""From the table of a batch to the advantage of each usable sample, by the configured function.

Every rank computes this for the whole batch from the same table, so no collective is needed and all agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from learner.algorithm_config import (
    AdvantageConfig,
    CustomAdvantage,
    GroupAdvantage,
    OverlongConfig,
    PassAtKAdvantage,
    SeveralRewardsAdvantage,
)
from learner.algorithms.advantages import group_advantages
from learner.algorithms.batch_advantages import batch_advantages
from learner.algorithms.gpg import gpg_advantages
from learner.algorithms.greedy_baseline import greedy_baseline_advantages
from learner.algorithms.leave_one_out import leave_one_out_advantages
from learner.algorithms.length_weighted import length_weighted_advantages
from learner.algorithms.overlong import overlong_penalty
from learner.algorithms.pass_at_k import best_of_group_advantages, pass_at_k_advantages
from learner.algorithms.rewards import GroupScores
from learner.algorithms.several_rewards import several_rewards_advantages
from learner.trainer.plug import load_function
from learner.trainer.table import Entry, SampleId, groups_of

AdvantageFunction = Callable[[Sequence[GroupScores]], Sequence[Tensor]]  # of the whole batch; a float64 [num_usable] for each group

_PLAIN: Mapping[str, AdvantageFunction] = {
    "leave_one_out": lambda groups: [leave_one_out_advantages(group.rewards) for group in groups],
    "batch": partial(batch_advantages, group_baseline=False),
    "group_then_batch": partial(batch_advantages, group_baseline=True),
    "length_weighted": lambda groups: [length_weighted_advantages(group.rewards, group.num_tokens) for group in groups],
    "gpg": gpg_advantages,
    "greedy_baseline": lambda groups: [greedy_baseline_advantages(group.rewards, greedy_reward=group.baseline) for group in groups],
    "teacher": lambda groups: [torch.zeros_like(group.rewards) for group in groups],  # given token by token, in objective.py
    "gae": lambda groups: [group.rewards for group in groups],  # what the critic's values are held against, token by token, in values.py
    "best_of_group": lambda groups: [best_of_group_advantages(group.rewards) for group in groups],
}


def advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    """The function that a configuration names. Raises ValueError for a user's function that cannot be loaded."""
    match config:
        case GroupAdvantage():
            ddof = int(config.deviation == "sample")
            return lambda groups: [group_advantages(group.rewards, normalize=config.normalize, ddof=ddof) for group in groups]
        case PassAtKAdvantage():
            return lambda groups: [pass_at_k_advantages(group.rewards, k=config.k, threshold=config.threshold) for group in groups]
        case SeveralRewardsAdvantage():
            return partial(several_rewards_advantages, weights=config.weights)
        case CustomAdvantage():
            return partial(load_function(config.function, key="algorithm.advantage.function"), **config.options)
        case _:
            return _PLAIN[config.kind]


def advantages_of(table: Sequence[Entry], function: AdvantageFunction, *, overlong: OverlongConfig | None = None, max_new_tokens: int = 0) -> dict[SampleId, float]:
    """Advantage of every usable sample, by id. Raises ValueError when the function's answer does not fit the groups or is not finite."""
    groups = [usable for usable in ([e for e in group if e.usable] for group in groups_of(table).values()) if usable]
    values = function([_scores(group, overlong, max_new_tokens) for group in groups])
    if [len(value) for value in values] != [len(group) for group in groups]:
        raise ValueError(f"the advantage function answered {[len(v) for v in values]} values for groups of {[len(g) for g in groups]} usable samples; it must give one for each, in order")
    result = {entry.id: float(value) for group, answered in zip(groups, values, strict=True) for entry, value in zip(group, answered, strict=True)}
    broken = [key for key, value in result.items() if not torch.isfinite(torch.tensor(value))]
    if broken:
        raise ValueError(f"the advantage function answered {result[broken[0]]} for sample {broken[0]}; advantages must be finite")
    return result


def _scores(group: Sequence[Entry], overlong: OverlongConfig | None, max_new_tokens: int) -> GroupScores:
    rewards = _rewards(group, overlong, max_new_tokens)
    greedy = group[0].baseline
    baseline = math.nan if greedy is None else float(_rewards([greedy], overlong, max_new_tokens))
    names = sorted({name for entry in group for name in entry.reward_parts})
    parts = {name: torch.tensor([entry.reward_parts.get(name, float("nan")) for entry in group], dtype=torch.float64) for name in names}
    return GroupScores(rewards=rewards, num_tokens=torch.tensor([entry.num_trained_tokens for entry in group]), parts=parts, baseline=baseline)


def _rewards(entries: Sequence[Entry], overlong: OverlongConfig | None, max_new_tokens: int) -> Tensor:
    """With the punishment of their lengths, float64 [num_entries]."""
    rewards = torch.tensor([entry.reward for entry in entries], dtype=torch.float64)
    return rewards if overlong is None else rewards + penalties_of(entries, overlong, max_new_tokens)


def penalties_of(entries: Sequence[Entry], overlong: OverlongConfig, max_new_tokens: int) -> Tensor:
    """What is added to each sample's reward for its length, float64 [num_entries], at most 0. The length is what the policy drew."""
    lengths, truncated = torch.tensor([e.num_drawn_tokens for e in entries]), torch.tensor([e.truncated for e in entries])
    return overlong.weight * overlong_penalty(lengths, max_tokens=max_new_tokens, buffer_tokens=overlong.buffer_tokens, truncated=truncated)
