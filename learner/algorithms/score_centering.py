"""Score centering: takes out of each token's gradient the mean that it has under the sampler's distribution whatever the reward."""

from __future__ import annotations

import torch
from torch import Tensor


def centered_score_loss(log_policy: Tensor, sampler: Tensor, weight: Tensor, drawn: Tensor, advantage: Tensor) -> Tensor:
    """-A (w_a log p_a - sum_v q_v w_v log p_v), [num_tokens]; only log p carries a gradient.

    Under q the mean of w s (s the score) is not 0 once weights are truncated or engines differ, and a reward that is not centred at every
    prefix turns that into drift. Subtracting the mean leaves the covariance of advantage and score. With w = p / q and full
    support the subtracted gradient is 0. Source: Score Centering Stabilizes Off-policy Reinforcement Learning (arXiv 2609.20807).
    Args: log_policy [num_tokens, vocabulary] log p; sampler [num_tokens, vocabulary] q; weight like sampler, w_v; drawn [num_tokens] ids; advantage [num_tokens].
    """
    if not log_policy.shape == sampler.shape == weight.shape or drawn.shape != advantage.shape or drawn.shape != log_policy.shape[:1]:
        shapes = [tuple(each.shape) for each in (log_policy, sampler, weight, drawn, advantage)]
        raise ValueError(f"log_policy, sampler and weight must be [num_tokens, vocabulary], drawn and advantage [num_tokens], got {shapes}")
    fixed = weight.detach()
    score = (fixed * log_policy).gather(1, drawn[:, None])[:, 0]
    # 0 * -inf: a token that the sampler never draws adds nothing, whatever the policy thinks of it.
    share = sampler.detach() * fixed
    mean = torch.where(share > 0, share * log_policy, torch.zeros_like(log_policy)).sum(dim=1)
    return -advantage.detach() * (score - mean)
