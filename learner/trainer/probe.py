"""What the trainer computes for a fixed prompt under each version: replicas compare it with their own after an update (push.verify)."""

from __future__ import annotations

import torch

from learner.trainer.mask import PROMPT
from learner.trainer.model import Policy
from learner.trainer.packing import Row
from learner.weights.announce import Probe

NUM_TOKENS = 32
_STEP = 7919  # a prime: the ids are spread over the vocabulary
TOLERANCES = {"float32": 0.02, "bfloat16": 0.3, "float16": 0.1}  # mean absolute difference of log-probs, by the coarser dtype of the two sides


class Prober:
    """Example: `Prober(policy, vocabulary=49152, tolerance=0.02, device=device)()`"""

    def __init__(self, policy: Policy, *, vocabulary: int, tolerance: float, device: torch.device) -> None:
        self._policy = policy
        self._tolerance = tolerance
        self.token_ids = tuple((1 + _STEP * index) % vocabulary for index in range(NUM_TOKENS))
        self._row = _row(torch.tensor(self.token_ids, device=device))

    def __call__(self) -> Probe:
        """Collective: one forward pass at temperature 1 over all rows of the head, which is what engines answer for a prompt's tokens."""
        with torch.no_grad(), self._policy.as_probed():
            values = self._policy(self._row)
        return Probe(token_ids=self.token_ids, logprobs=tuple(values.float().cpu().tolist()), tolerance=self._tolerance)


def _row(ids: torch.Tensor) -> Row:
    """One document, every token but the first a target."""
    num, device = len(ids), ids.device
    targets = num - 1
    zeros = torch.zeros(targets, dtype=torch.int64, device=device)
    return Row(
        ids=ids, position=torch.arange(num, device=device), document=torch.zeros(num, dtype=torch.int64, device=device),
        branch=torch.full((num,), PROMPT, dtype=torch.int64, device=device), query=torch.arange(targets, device=device), target=ids[1:], behaviour=zeros.float(), advantage=zeros.float(),
        sequence_tokens=zeros + targets, sequence=zeros, num_sequences=1, staleness=zeros, kept=zeros == 0, selected=zeros != 0,
    )  # fmt: skip
