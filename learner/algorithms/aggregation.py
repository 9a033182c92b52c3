"""Token losses to one number, by a denominator that is known before the first backward pass.

The denominator is the whole batch's (over all ranks, rows and micro-batches), so sums over any split of the tokens add up to
the same loss, and gradients are added up, never averaged.
"""

from __future__ import annotations

from torch import Tensor


def token_mean(token_loss: Tensor, *, num_tokens: int) -> Tensor:
    """This part's share of sum(token_loss) / num_tokens. Args: token_loss [n]; num_tokens: trained tokens of the whole batch."""
    _require(token_loss, num_tokens, "num_tokens")
    return token_loss.sum() / num_tokens


def sequence_mean(token_loss: Tensor, sequence_tokens: Tensor, *, num_sequences: int) -> Tensor:
    """This part's share of mean over samples of (mean over the sample's trained tokens).

    Args: token_loss [n]; sequence_tokens [n], trained tokens of the sample each token belongs to; num_sequences: usable samples
    with a trained token in the whole batch.
    """
    _require(token_loss, num_sequences, "num_sequences")
    if sequence_tokens.shape != token_loss.shape:
        raise ValueError(f"sequence_tokens {tuple(sequence_tokens.shape)} and token_loss {tuple(token_loss.shape)} must both be [n]")
    return (token_loss / sequence_tokens).sum() / num_sequences


def sequence_sum(token_loss: Tensor, *, num_sequences: int, norm_tokens: int) -> Tensor:
    """This part's share of mean over samples of (sum over the sample's trained tokens / norm_tokens).

    The constant stands in for every sample's own length, so a long answer is not punished less a token than a short one.
    Source: Liu et al. 2025 (Dr. GRPO), section 3.2 and its listing, norm_tokens being the generation budget.
    """
    _require(token_loss, num_sequences, "num_sequences")
    if norm_tokens <= 0:
        raise ValueError(f"norm_tokens must be at least 1, got {norm_tokens}")
    return token_loss.sum() / (num_sequences * norm_tokens)


def _require(token_loss: Tensor, count: int, name: str) -> None:
    if token_loss.dim() != 1:
        raise ValueError(f"token_loss must be [n], got {tuple(token_loss.shape)}")
    if count <= 0:
        raise ValueError(f"{name} must be at least 1, got {count}; a batch without a trained token takes no optimizer step")
