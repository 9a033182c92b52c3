"""The proximal policy of decoupled PPO without a forward pass: on the straight line, in log space, between sampler and trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import same_length


def log_linear_proximal(logprob: Tensor, behaviour: Tensor, staleness: Tensor) -> Tensor:
    """behaviour + s / (s + 1) (logprob - behaviour), [num_tokens], detached.

    Token drawn at step v - s, trained in the step that starts from v and makes v + 1: the start of the step lies s of s + 1 steps along
    the way. s = 0 gives behaviour itself, the policy that drew it. Source: the log-linear approximation of AReaL (Fu et al. 2025,
    arXiv 2505.24298, and its documentation); Hilton et al. 2022 (arXiv 2110.00641) for the decoupled objective.
    Args: staleness [num_tokens], in steps, at least 0.
    """
    same_length(logprob=logprob, behaviour=behaviour, staleness=staleness)
    steps = staleness.to(logprob.dtype)
    return torch.lerp(behaviour.to(logprob.dtype), logprob.detach(), steps / (steps + 1))


def token_staleness(oldest: int, versions: Tensor, *, oldest_version: int | None = None) -> Tensor:
    """Staleness of each token, [num_tokens] int64, from that of the sample's oldest token and the version of each token.

    Versions rise by one a published step in a lineage, so a token drawn n versions later than the oldest is n steps younger; never below 0.
    oldest_version: where these are not all tokens of the sample; None: they are.
    """
    if versions.numel() == 0:
        return versions
    return (oldest - (versions - (versions.min() if oldest_version is None else oldest_version))).clamp(min=0)
