"""Choices among the tokens of the whole batch, which no row or rank can make alone: M2PO's mask, Clip-Cov's and KL-Cov's tokens.

Values of all ranks' tokens are gathered, a threshold or a count comes out of them, and each rank applies it to its rows. So
the choice does not depend on how the batch was cut. Made once a step, before its first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithm_config import AlgorithmConfig, ClipCovLoss, KlCovLoss
from learner.algorithms.covariance import random_selection, token_covariance, top_threshold
from learner.algorithms.second_moment import second_moment_threshold, within
from learner.trainer.packing import Row

Gather = Callable[[Tensor], Tensor]  # a float32 vector of each rank to all of them joined; collective


def select_each(rows: Sequence[Sequence[Row]], configs: Mapping[str, AlgorithmConfig], gather: Gather) -> list[list[Row]]:
    """`select` for the rows of each data set by itself, in the order of `configs` on every rank; other rows stay as they are. Collective."""
    result = [list(part) for part in rows]
    for name, config in configs.items():
        mine = [[index for index, row in enumerate(part) if row.data_set == name] for part in result]
        chosen = select([[part[index] for index in indexes] for part, indexes in zip(result, mine, strict=True)], config, gather)
        for part, indexes, made in zip(result, mine, chosen, strict=True):
            for index, row in zip(indexes, made, strict=True):
                part[index] = row
    return result


def select(rows: Sequence[Sequence[Row]], config: AlgorithmConfig, gather: Gather) -> list[list[Row]]:
    """The rows (of each minibatch) with `kept` and `selected` filled in. Collective where the algorithm has such a choice.

    Clip-Cov and KL-Cov measure covariance with the sampler's log-probs, over the tokens that are computed.
    """
    result = [list(part) for part in rows]
    if config.correction is not None and config.correction.second_moment is not None:
        threshold = second_moment_threshold(gather(_joined([_log_ratio(row) for part in result for row in part])), bound=config.correction.second_moment)
        result = [[replace(row, kept=within(_log_ratio(row), threshold) > 0) for row in part] for part in result]
    if isinstance(config.loss, ClipCovLoss | KlCovLoss):
        logprob = gather(_joined([row.behaviour for part in result for row in part])).double()
        advantage = gather(_joined([row.advantage for part in result for row in part])).double()
        means = (float(logprob.mean()), float(advantage.mean())) if logprob.numel() else (0.0, 0.0)
        covariance = token_covariance(logprob, advantage, logprob_mean=means[0], advantage_mean=means[1])
        result = [[replace(row, selected=_chosen(row, config.loss, covariance, means)) for row in part] for part in result]
    return result


def _chosen(row: Row, loss: ClipCovLoss | KlCovLoss, whole: Tensor, means: tuple[float, float]) -> Tensor:
    """Bool [num_targets]. Args: whole, covariance of all tokens of the batch; means of log-prob and advantage over them."""
    mine = token_covariance(row.behaviour.double(), row.advantage.double(), logprob_mean=means[0], advantage_mean=means[1])
    if isinstance(loss, KlCovLoss):
        return mine >= top_threshold(whole, share=loss.share)
    num_eligible = int(((whole >= loss.covariance_low) & (whole <= loss.covariance_high)).sum())
    wanted = math.ceil(loss.share * whole.numel())
    return random_selection(mine, _keys(row), low=loss.covariance_low, high=loss.covariance_high, num_eligible=num_eligible, num_wanted=wanted)


def _keys(row: Row) -> Tensor:
    """A number in [0, 1) for each token that depends on the token alone, not on rank or row: mixed from its id, place and log-prob bits."""
    bits = row.behaviour.contiguous().view(torch.int32).to(torch.int64)
    mixed = (bits * 2654435761 + row.target * 40503 + row.position[row.query] * 69069) % (1 << 31)
    mixed = (mixed * 1103515245 + 12345 + (mixed >> 16)) % (1 << 31)
    return mixed.double() / (1 << 31)


def _log_ratio(row: Row) -> Tensor:
    assert row.start is not None, "the pass before the first update comes before the selection"
    return (row.start - row.behaviour).float()


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat([vector.float().cpu() for vector in vectors]) if vectors else torch.zeros(0)
