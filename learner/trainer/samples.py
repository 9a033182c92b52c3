"""The trainer's own view of a finished sample, free of the wire's types."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One strand of a trajectory (most have one only), on the CPU. All strands of a sample carry its (group_id, sample_index).

    Example: Sample(group_id="g7", sample_index=0, prompt_ids=tensor([5, 6]), completion_ids=tensor([7, 2]),
    behaviour=tensor([-0.1, -0.7]), loss_mask=tensor([True, True]), text="seven")
    """

    group_id: str
    sample_index: int
    prompt_ids: Tensor  # int64 [num_prompt_tokens], at least one
    completion_ids: Tensor  # int64 [num_completion_tokens], at least one
    behaviour: Tensor  # float32 [num_completion_tokens], log-probs under the distribution sampled from
    loss_mask: Tensor  # bool [num_completion_tokens], True where the policy drew the token
    text: str = ""  # for people
    versions: tuple[int, ...] = ()  # policy versions that drew it, in order; for people
    token_versions: Tensor | None = None  # int64 [num_completion_tokens], version that drew each token; None: one for all
    strand: int = 0  # its place among those of its sample, in the order of time
    sample_tokens: int = 0  # trained tokens of the whole sample, all its strands together; 0: this is the only one
    first_version: int | None = None  # oldest version of the whole sample; None: that of this strand
    turn_rewards: Tensor | None = None  # float32 [num_completion_tokens], at the last token of each turn what it was given; None: nothing by turn

    def __post_init__(self) -> None:
        num_tokens = self.completion_ids.numel()
        lengths = {"logprobs": self.behaviour.numel(), "loss_mask": self.loss_mask.numel()}
        for also, values in (("token versions", self.token_versions), ("turn rewards", self.turn_rewards)):
            if values is not None:
                lengths[also] = values.numel()
        for name, length in lengths.items():
            if length != num_tokens:
                raise ValueError(f"sample ({self.group_id}, {self.sample_index}) has {num_tokens} completion ids but {length} {name}; each token needs exactly one")
        if num_tokens == 0 or self.prompt_ids.numel() == 0:
            raise ValueError(f"sample ({self.group_id}, {self.sample_index}) has {self.prompt_ids.numel()} prompt and {num_tokens} completion tokens; each needs at least one")
        if not bool(torch.isfinite(self.behaviour[self.loss_mask]).all()):
            raise ValueError(f"sample ({self.group_id}, {self.sample_index}) has a log-prob that is not finite; the gateway must mark such a sample unusable")

    @property
    def num_trained_tokens(self) -> int:
        """Completion tokens with loss mask 1."""
        return int(self.loss_mask.sum())

    @property
    def num_sample_tokens(self) -> int:
        """Trained tokens of the whole sample."""
        return self.sample_tokens or self.num_trained_tokens
