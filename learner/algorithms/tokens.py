"""What a policy loss is computed from: the trained tokens of one packed row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Trained tokens of whole samples, each sample's in order, one sample after another; a row may have none.

    Example: Tokens(logprob=tensor([-1., -2.]), old=tensor([-1., -2.]), behaviour=tensor([-1., -2.1]), advantage=tensor([1., 1.]),
    sequence=tensor([0, 0]), num_sequences=1, selected=tensor([False, False]))
    """

    logprob: Tensor  # [n] of the policy being updated; the only one with a gradient
    old: Tensor  # [n] of the policy that the ratio is measured from
    behaviour: Tensor  # [n] reported by the sampler
    advantage: Tensor  # [n]
    sequence: Tensor  # int64 [n], sample of each token, from 0
    num_sequences: int
    selected: Tensor  # bool [n], tokens that a selection over the whole batch holds back (clip_cov, kl_cov); else all False
