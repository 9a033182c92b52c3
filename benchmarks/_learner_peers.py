"""What the learner is measured against: a bare loop over the same packed tensors, and padded batches of the same samples.

Both are what a careful person writes by hand on transformers' model: FSDP2, layers compiled one by one, log-probs of 2,048 tokens at a time, fused
AdamW. On a GPU the packed rows use flex attention, the padded ones flash attention (right padding needs no mask); on a CPU a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from benchmarks._learner_shapes import randomize
from learner.trainer.mask import PROMPT, attention_mask
from learner.trainer.packing import Row
from learner.trainer.samples import Sample

CHUNK_TOKENS = 2048
_mask: list[Any] = [None]  # of the row being computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one forward pass of a peer needs, on its device."""

    ids: Tensor  # int64 [batch, length]
    position: Tensor | None  # int64 [1, length]; None: 0, 1, 2, ...
    mask: Any  # of a packed row; None: causal
    query: Tensor  # int64 [num_targets], place in the flattened batch
    target: Tensor  # int64 [num_targets]
    behaviour: Tensor  # float32 [num_targets]
    advantage: Tensor  # float32 [num_targets]


def _flex(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **more: Any) -> tuple[Any, None]:
    if _mask[0] is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None
    answer: Any = flex_attention(query, key, value, block_mask=_mask[0], scale=scaling, enable_gqa=True)
    return answer.transpose(1, 2), None


AttentionInterface.register("bare", _flex)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's: packed rows are of few lengths and get a program for each, padded batches of many lengths share one."""
    of_packed, of_padded = torch.compile(forward, dynamic=False), torch.compile(forward, dynamic=True)
    return lambda *values, **more: (of_padded if _mask[0] is None else of_packed)(*values, **more)


class Bare(nn.Module):
    """A model, its optimizer and a loop: `Bare(config, mesh, torch.bfloat16).step(batches, num_tokens)`."""

    def __init__(self, config: Any, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.cuda_mode = mesh.device_type == "cuda"
        self.head: Literal["chunks", "trained", "all"] = "chunks"  # how much of [tokens, vocabulary] exists at once
        with torch.device(mesh.device_type):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="bare" if self.cuda_mode else "sdpa")
        randomize(self.model)
        self.eval()
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            if self.cuda_mode:
                layer.forward = _compiled(layer.forward)
                fully_shard(layer, mesh=mesh, mp_policy=precision)
        if self.cuda_mode:
            fully_shard(self, mesh=mesh, mp_policy=precision)
        self._logprobs = torch.compile(_logprobs, dynamic=True) if self.cuda_mode else _logprobs
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def forward(self, batch: Batch, num_tokens: int) -> Tensor:
        _mask[0] = batch.mask if self.cuda_mode else None
        hidden = self.model.model(input_ids=batch.ids, position_ids=batch.position, attention_mask=None if self.cuda_mode else batch.mask, use_cache=False).last_hidden_state
        ratio = (self._scored(hidden.flatten(0, 1), batch) - batch.behaviour).exp()
        return -torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.28) * batch.advantage).sum() / num_tokens

    def _scored(self, hidden: Tensor, batch: Batch) -> Tensor:
        weight = self.model.lm_head.weight
        if self.head == "all":
            return torch.log_softmax((hidden @ weight.t()).float(), dim=-1)[batch.query, batch.target]
        if self.head == "trained":
            return plain_logprobs(hidden[batch.query], weight, batch.target)
        parts = zip(hidden[batch.query].split(CHUNK_TOKENS), batch.target.split(CHUNK_TOKENS), strict=True)
        return torch.cat([checkpoint(self._logprobs, h, weight, t, use_reentrant=False) for h, t in parts])

    def plainly(self, batch: Batch, num_tokens: int) -> None:
        """Forward and backward of one batch as the first version of every trainer has it: nothing compiled, logits of every position at once. For its memory: the gradient is thrown away."""
        with torch.compiler.set_stance("force_eager"):
            self._once(batch, num_tokens, head="all")

    def with_whole_logits(self, batch: Batch, num_tokens: int) -> None:
        """As a step's, but with the matrix [trained tokens, vocabulary] whole."""
        self._once(batch, num_tokens, head="trained")

    def _once(self, batch: Batch, num_tokens: int, *, head: Literal["trained", "all"]) -> None:
        self.head = head
        try:
            self(batch, num_tokens).backward()
        finally:
            self.head = "chunks"
            self.optimizer.zero_grad()

    def step(self, batches: Sequence[Batch], num_tokens: int) -> None:
        for batch in batches:
            self(batch, num_tokens).backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """With the whole matrix, as the first version of every loss has it."""
    return torch.log_softmax((hidden @ weight.t()).float(), dim=-1).gather(1, target[:, None])[:, 0]


def _logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return plain_logprobs(hidden, weight, target)


def packed(rows: Sequence[Row], device: torch.device, lengths: Sequence[int]) -> list[Batch]:
    """The learner's own rows, filled up to the same lengths."""
    batches = []
    for row, length in zip(rows, lengths, strict=True):
        more = length - row.ids.numel()
        document, branch = functional.pad(row.document, (0, more), value=-1), functional.pad(row.branch, (0, more), value=PROMPT)
        mask = _block_mask(document.to(device), branch.to(device)) if device.type == "cuda" else attention_mask(document, branch)
        ids, position = (functional.pad(values, (0, more))[None].to(device) for values in (row.ids, row.position))
        batches.append(Batch(ids=ids, position=position, mask=mask, query=row.query.to(device), target=row.target.to(device), behaviour=row.behaviour.to(device), advantage=row.advantage.to(device)))
    return batches


def _block_mask(document: Tensor, branch: Tensor) -> Any:
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[q] == document[k]) & ((branch[k] == PROMPT) | (branch[q] == branch[k]))

    length = document.numel()
    return create_block_mask(visible, None, None, length, length, device=str(document.device))  # made beforehand, once: not worth a compilation


def padded(made: Sequence[Sample], advantages: Sequence[float], device: torch.device, *, batch_size: int, multiple: int) -> list[Batch]:
    """Whole sequences, prompt and all, `batch_size` to a batch in the order they came, padded to the longest (to a multiple, for few compilations)."""
    batches = []
    for start in range(0, len(made), batch_size):
        part, given = made[start : start + batch_size], advantages[start : start + batch_size]
        length = -(-max(s.prompt_ids.numel() + s.completion_ids.numel() - 1 for s in part) // multiple) * multiple
        ids = torch.zeros(len(part), length, dtype=torch.int64)
        query = []
        for number, s in enumerate(part):
            whole = torch.cat([s.prompt_ids, s.completion_ids[:-1]])
            ids[number, : whole.numel()] = whole
            query.append(number * length + torch.arange(s.prompt_ids.numel() - 1, whole.numel()))
        advantage = torch.cat([torch.full((s.completion_ids.numel(),), value) for s, value in zip(part, given, strict=True)])
        batches.append(
            Batch(
                ids=ids.to(device), position=None, mask=None, query=torch.cat(query).to(device), target=torch.cat([s.completion_ids for s in part]).to(device),
                behaviour=torch.cat([s.behaviour for s in part]).to(device), advantage=advantage.to(device),
            )
        )  # fmt: skip
    return batches
