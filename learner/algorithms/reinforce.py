"""REINFORCE: the score function times the advantage, without a ratio."""

from __future__ import annotations

from torch import Tensor

from learner.algorithms.ratio import ratio_of, same_length


def reinforce_loss(logprob: Tensor, old: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob, [num_tokens]. Unbiased on tokens of this policy; for older ones a correction weight makes it so.

    Metrics: `ratio` against old, for people. Source: Williams 1992.
    """
    same_length(logprob=logprob, old=old, advantage=advantage)
    return -advantage * logprob, {"ratio": ratio_of(logprob.detach() - old).sum()}
