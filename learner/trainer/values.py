"""From a critic's values to the advantage and the return of every token of a batch, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithm_config import AlgorithmConfig, CriticAdvantage, KlConfig
from learner.algorithms.gae import packed_advantages
from learner.algorithms.kl import ESTIMATORS
from learner.algorithms.segments import segment_sum
from learner.trainer.packing import Row

Total = Callable[[Tensor], Tensor]  # float64 sums of each rank to their sum on all; collective
_SMALLEST_VARIANCE = 1e-16  # below it the spread of advantages is rounding


def token_rewards(row: Row, kl: KlConfig | None) -> Tensor:
    """[num_targets], float64: what each turn was given at its last token, the rest of the sample's reward at the sample's last, and with a KL
    in the reward its price at each.

    row.advantage holds the sample's reward at each of its tokens; all of a sample's rewards sum to it, shaping of lengths included.
    """
    rewards = torch.zeros_like(row.advantage, dtype=torch.float64)
    if row.num_targets:
        last = torch.ones_like(row.sequence, dtype=torch.bool)
        last[:-1] = row.sequence[1:] != row.sequence[:-1]
        given = torch.zeros_like(rewards) if row.turn_reward is None else row.turn_reward.to(torch.float64)
        so_far = segment_sum(given, row.sequence, num_sequences=row.num_sequences)[row.sequence]
        rewards = given + torch.where(last, row.advantage.to(torch.float64) - so_far, rewards)
    if kl is not None and kl.where == "reward":
        assert row.reference is not None, "a KL in the reward has a reference"
        rewards = rewards - kl.coefficient * ESTIMATORS[kl.estimator](row.behaviour - row.reference).to(torch.float64)
    return rewards


def with_advantages_each(rows: Sequence[Sequence[Row]], values: Sequence[Sequence[Tensor]], configs: Mapping[str, AlgorithmConfig], total: Total) -> list[list[Row]]:
    """`with_advantages` for the rows of each data set by itself, in the order of `configs` on every rank. Collective."""
    result = [list(part) for part in rows]
    for name, config in configs.items():
        assert isinstance(config.advantage, CriticAdvantage), "a critic goes with advantage.kind=gae"
        mine = [[index for index, row in enumerate(part) if row.data_set == name] for part in result]
        chosen = [[part[index] for index in indexes] for part, indexes in zip(result, mine, strict=True)]
        given = [[part[index] for index in indexes] for part, indexes in zip(values, mine, strict=True)]
        made = with_advantages(chosen, given, config.advantage, config.kl, total)
        for part, indexes, new in zip(result, mine, made, strict=True):
            for index, row in zip(indexes, new, strict=True):
                part[index] = row
    return result


def with_advantages(rows: Sequence[Sequence[Row]], values: Sequence[Sequence[Tensor]], config: CriticAdvantage, kl: KlConfig | None, total: Total) -> list[list[Row]]:
    """The rows with `value`, `returns` and the advantage of each token, whitened over the batch where configured. Collective."""
    made = [[_with(row, value, config, kl) for row, value in zip(part, given, strict=True)] for part, given in zip(rows, values, strict=True)]
    if not config.whiten:
        return [[_carrying(row, advantage) for row, advantage in part] for part in made]
    tokens = [advantage for part in made for _, advantage in part]
    device = tokens[0].device if tokens else torch.device("cpu")

    def summed(function: Callable[[Tensor], Tensor]) -> Tensor:
        return sum((function(advantage).sum() for advantage in tokens), torch.zeros((), dtype=torch.float64, device=device))

    count, plain = total(torch.stack([summed(torch.ones_like), summed(lambda a: a)]).cpu()).tolist()
    mean = plain / max(count, 1.0)
    variance = float(total(summed(lambda a: (a - mean).square())[None].cpu())) / max(count, 1.0)
    scale = variance**-0.5 if variance > _SMALLEST_VARIANCE else 0.0
    return [[_carrying(row, (advantage - mean) * scale) for row, advantage in part] for part in made]


def _carrying(row: Row, advantage: Tensor) -> Row:
    assert row.value is not None
    return replace(row, advantage=advantage.to(row.value.dtype))


def _with(row: Row, value: Tensor, config: CriticAdvantage, kl: KlConfig | None) -> tuple[Row, Tensor]:
    advantage, returns = packed_advantages(token_rewards(row, kl), value, row.sequence, gamma=config.gamma, lam=config.lam)
    return replace(row, value=value, returns=returns.to(value.dtype)), advantage
