"""Log-probs of chosen tokens at the sampling temperature, and entropies where wanted, a tile of the vocabulary at a time.

The matrix [tokens, vocabulary] is the largest tensor of a language model's loss and never exists. Forward: each tile's logits are reduced to two or
three numbers a token and thrown away. Backward: they are made again, and with the saved log of the normaliser each tile's gradient is elementwise:

    d log p(t) / d z = 1[t] - p          d H / d z = -p (log p + H)

Tiles run over the vocabulary first, so the weight's gradient is one product over all tokens, and the hidden states' is summed in float32.

Ids that the engine never draws (padding rows, holes of the vocabulary) have probability 0 here too: rows behind the last id with text are not computed, others are
masked in their tile. Their gradient is 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

CPU_TILE, CUDA_TILE = 1 << 24, 1 << 28  # logits of one tile; of bfloat16 a CUDA tile is 512 MiB
BLOCK_TOKENS = 16_384  # tokens of one tile at most
_ALIGNED = 128  # classes computed are a multiple of so many where the head has the rows: products of odd widths are slow
_CLASSES = 1024  # tiles hold a multiple of so many classes, except the last


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """How hidden states become a distribution. Example: Head(temperature=0.7)"""

    temperature: float  # as sampled: softmax(logits / temperature)
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap) before the temperature (Gemma 2)
    float32: bool = False  # logits in float32 out of the compute dtype's inputs, instead of rounded to it
    fused: bool = False  # elementwise parts compiled to one kernel each
    tile: int | None = None  # logits of one tile; None: by device
    without_text: tuple[int, ...] = ()  # ids that are never drawn, ascending: no part of the distribution (protos/vocabulary.py)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; greedy samples have no distribution to train on")


def token_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, head: Head, with_entropy: bool = False) -> Tensor:
    """log softmax(logits / temperature)[target], [num_targets], at least float32; with_entropy: [2, num_targets], the entropies below.

    The distribution is over all ids but head.without_text; the log-prob of one of those is -inf.
    Args: hidden [num_targets, width]; weight [vocabulary, width] and bias [vocabulary] of the output head; target [num_targets].
    Raises ValueError when hidden and target disagree in number.
    """
    if hidden.dim() != 2 or target.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} must be [n, width] and [n] of one n")
    apply: Any = _Scores.apply
    logprob, entropy = cast("tuple[Tensor, Tensor]", apply(hidden, weight, bias, target, head, with_entropy))
    return torch.stack([logprob, entropy]) if with_entropy else logprob


class _Scores(torch.autograd.Function):
    """(log-prob, entropy) of each token; the entropy is empty unless wanted."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: Head, with_entropy: bool) -> tuple[Tensor, Tensor]:
        reduce = _fused(_reduced) if head.fused else _reduced
        num_classes = _num_computed(weight.shape[0], head.without_text)
        picked, norms, entropies = None, [], []
        for classes in _class_blocks(num_classes, hidden, head):
            holes = _holes(head.without_text, classes, hidden.device)
            parts = [reduce(_logits(hidden[tokens], weight, bias, classes, head), target[tokens] - classes.start, head.temperature, head.softcap, holes, with_entropy) for tokens in _token_blocks(hidden)]
            found, norm, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
            picked = found if picked is None else picked + found
            norms.append(norm)
            entropies.append(entropy)
        norm = torch.logsumexp(torch.stack(norms), dim=0)
        assert picked is not None
        if num_classes < weight.shape[0]:
            picked = picked.masked_fill(target >= num_classes, -torch.inf)
        whole = torch.zeros_like(norm[:0])
        if with_entropy:
            each = torch.stack(norms)
            whole = ((each - norm).exp() * (torch.stack(entropies) + norm - each)).sum(0)
        ctx.head, ctx.with_entropy = head, with_entropy
        ctx.save_for_backward(hidden, weight, bias, target, norm, whole)
        return picked - norm, whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, norm, entropy = ctx.saved_tensors
        head, with_entropy = ctx.head, ctx.with_entropy
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]
        slope = _fused(_slope) if head.fused else _slope
        d_hidden = torch.zeros_like(hidden, dtype=norm.dtype) if wants_hidden else None
        num_classes = _num_computed(weight.shape[0], head.without_text)
        d_weight = _empty_but_for(num_classes, weight) if wants_weight else None
        d_bias = _empty_but_for(num_classes, bias) if wants_bias else None
        blocks = _token_blocks(hidden)
        for classes in _class_blocks(num_classes, hidden, head):
            holes = _holes(head.without_text, classes, hidden.device)
            of_weight: Tensor | None = None
            of_bias: Tensor | None = None
            for tokens in blocks:
                logits = _logits(hidden[tokens], weight, bias, classes, head)
                given = (grads[0][tokens], grads[1][tokens] if with_entropy else None, norm[tokens], entropy[tokens] if with_entropy else None)
                d_logits = slope(logits, target[tokens] - classes.start, *given, head.temperature, head.softcap, holes, hidden.dtype)
                del logits
                if d_hidden is not None:
                    d_hidden[tokens] += _product(d_logits, weight[classes], norm.dtype)
                if wants_weight:
                    part = _product(d_logits.t(), hidden[tokens], norm.dtype if len(blocks) > 1 else weight.dtype)
                    of_weight = part if of_weight is None else of_weight + part
                if wants_bias:
                    total = d_logits.sum(0, dtype=norm.dtype)
                    of_bias = total if of_bias is None else of_bias + total
            if d_weight is not None and of_weight is not None:
                d_weight[classes] = of_weight
            if d_bias is not None and of_bias is not None:
                d_bias[classes] = of_bias
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None


def _token_blocks(hidden: Tensor) -> list[slice]:
    """At least one, so that a row without targets takes part in every collective."""
    return [slice(start, min(start + BLOCK_TOKENS, hidden.shape[0])) for start in range(0, max(hidden.shape[0], 1), BLOCK_TOKENS)]


def _num_computed(num_rows: int, without_text: tuple[int, ...]) -> int:
    """Rows of the head up to the last id with text, and on to a multiple of _ALIGNED."""
    num_padding = 0
    while num_padding < len(without_text) and without_text[-1 - num_padding] == num_rows - 1 - num_padding:
        num_padding += 1
    return min(num_rows, -(-(num_rows - num_padding) // _ALIGNED) * _ALIGNED)


def _holes(without_text: tuple[int, ...], classes: slice, device: torch.device) -> Tensor | None:
    """Which classes of a tile are never drawn, bool [classes]; None: all may be."""
    inside = without_text[bisect_left(without_text, classes.start) : bisect_left(without_text, classes.stop)]
    return _marked(inside, classes.start, classes.stop - classes.start, device) if inside else None


@lru_cache(maxsize=64)
def _marked(ids: tuple[int, ...], start: int, num_classes: int, device: torch.device) -> Tensor:
    """Kept from call to call: made anew it would be a copy to the device for each tile."""
    marked = torch.zeros(num_classes, dtype=torch.bool)
    marked[torch.tensor(ids) - start] = True
    return marked.to(device)


def _empty_but_for(num_classes: int, like: Tensor) -> Tensor:
    """Not initialised up to row num_classes, and 0 behind it."""
    made = torch.empty_like(like)
    made[num_classes:] = 0
    return made


def _class_blocks(num_classes: int, hidden: Tensor, head: Head) -> Iterator[slice]:
    tile = head.tile or (CUDA_TILE if hidden.is_cuda else CPU_TILE)
    size = max(1, tile // max(1, min(hidden.shape[0], BLOCK_TOKENS)))
    if size >= _CLASSES:
        size -= size % _CLASSES
    return (slice(start, min(start + size, num_classes)) for start in range(0, num_classes, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: slice, head: Head) -> Tensor:
    own = None if bias is None else bias[classes]
    if not head.float32 or hidden.dtype.itemsize >= 4:
        return functional.linear(hidden, weight[classes], own)
    made = _product(hidden, weight[classes].t(), torch.float32)
    return made if own is None else made + own


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, summed in float32 at least and not rounded in between."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _shaped(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    return values / temperature


def _reduced(logits: Tensor, local: Tensor, temperature: float, softcap: float | None, holes: Tensor | None, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of a tile: the target's logit where it lies inside (else 0), the log of the normaliser, and the entropy of the tile by itself. Each [tokens]."""
    values = _shaped(logits, temperature, softcap)
    if holes is not None:
        values = values.masked_fill(holes, -torch.inf)
    inside = (local >= 0) & (local < values.shape[1])
    picked = values.gather(1, local.clamp(0, values.shape[1] - 1)[:, None])[:, 0]
    norm = torch.logsumexp(values, dim=1)
    if holes is not None:
        norm = norm.clamp_min(torch.finfo(norm.dtype).min)  # of a tile of nothing but holes: differences to -inf would be NaN
    entropy = norm[:0]
    if with_entropy:
        logprob = values - norm[:, None]
        probability = logprob.exp()
        entropy = -(probability * logprob.masked_fill(probability == 0, 0.0)).sum(1)  # a logit of -inf adds 0 and not NaN
    return torch.where(inside, picked, torch.zeros_like(picked)), norm, entropy


def _slope(
    logits: Tensor, local: Tensor, of_logprob: Tensor, of_entropy: Tensor | None, norm: Tensor, entropy: Tensor | None, temperature: float, softcap: float | None, holes: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Gradient [tokens, classes] of a tile's raw logits, in dtype."""
    values = _shaped(logits, temperature, softcap)
    logprob = values - norm[:, None]
    probability = logprob.exp()
    chosen = torch.arange(values.shape[1], device=values.device)[None, :] == local[:, None]
    slope = of_logprob[:, None] * (chosen.to(values.dtype) - probability)
    if of_entropy is not None and entropy is not None:
        slope = slope - of_entropy[:, None] * probability * (logprob.masked_fill(probability == 0, 0.0) + entropy[:, None])
    slope = slope / temperature
    if softcap is not None:
        slope = slope * (1 - (values * temperature / softcap).square())
    if holes is not None:
        slope = slope.masked_fill(holes, 0.0)
    return slope.to(dtype)


_FUSED: dict[Callable[..., Any], Callable[..., Any]] = {}


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled once, for any number of tokens."""
    if function not in _FUSED:
        _FUSED[function] = torch.compile(function, dynamic=True)
    return _FUSED[function]
