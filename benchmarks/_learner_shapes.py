"""Models, samples and arithmetic that the learner's benchmark and its GPU checks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, Qwen3Config

from learner.trainer.engine import Engine
from learner.trainer.loading import from_config_on_meta, materialize
from learner.trainer.mask import reach
from learner.trainer.model import Policy, wrapped
from learner.trainer.packing import Row
from learner.trainer.samples import Sample
from learner.trainer.table import Counts, Minibatch

SIGMA = math.log(8) / 2.326  # of log-normal lengths whose 99th percentile is 8 medians
QWEN3 = {"0.6B": (1024, 3072, 28, 16, 8), "1.7B": (2048, 6144, 28, 16, 8), "4B": (2560, 9728, 36, 32, 8)}  # hidden, intermediate, layers, heads, key heads


def shape(name: str) -> Any:
    """transformers' configuration of a model by name: Qwen3 shapes, or "cpu", 11 M parameters."""
    if name == "cpu":
        return LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192)
    hidden, inner, layers, heads, key_heads = QWEN3[name]
    return Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=128,
        max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip


def policy_of(config: Any, mesh: DeviceMesh, engine: Engine, compute_dtype: torch.dtype) -> Policy:
    """A policy with random weights, made as load_policy makes it but for the files."""
    causal_lm = from_config_on_meta(config, torch.float32)
    policy = wrapped(causal_lm, mesh=mesh, compute_dtype=compute_dtype, temperature=1.0, master_dtype=torch.float32, engine=engine)
    materialize(causal_lm, torch.device(mesh.device_type))
    randomize(causal_lm)
    return policy.eval()


def randomize(model: nn.Module) -> None:
    """Norms 1, everything else normal of 0.02."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)


def samples(*, num_groups: int, group_size: int, prompt_tokens: int, median_tokens: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Groups of random ids, completions log-normal and at most 8 medians long."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for group in range(num_groups):
        prompt = torch.randint(0, vocabulary, (prompt_tokens,), generator=generator)
        for index in range(group_size):
            length = int(min(8 * median_tokens, 1 + median_tokens * math.exp(SIGMA * float(torch.randn((), generator=generator)))))
            made.append(sample(f"g{group}", index, prompt, torch.randint(0, vocabulary, (length,), generator=generator)))
    return made


def one_row(num_tokens: int, *, prompt_tokens: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Samples of prompts of their own that fill one row of exactly num_tokens: lengths log-normal around 735, at least 32."""
    generator, left = torch.Generator().manual_seed(seed), num_tokens
    made: list[Sample] = []
    while left > 0:
        length = min(left, 32 + prompt_tokens + int(math.exp(6.6 + 0.8 * float(torch.randn((), generator=generator)))))
        if left - length < prompt_tokens + 32:
            length = left
        prompt = torch.randint(0, vocabulary, (prompt_tokens,), generator=generator)
        made.append(sample(f"g{len(made)}", 0, prompt, torch.randint(0, vocabulary, (length - prompt_tokens + 1,), generator=generator)))  # its last token is not an input
        left -= length
    return made


def sample(group: str, index: int, prompt: torch.Tensor, completion: torch.Tensor) -> Sample:
    length = completion.numel()
    return Sample(group_id=group, sample_index=index, prompt_ids=prompt, completion_ids=completion, behaviour=torch.full((length,), -11.9), loss_mask=torch.ones(length, dtype=torch.bool))


def minibatch(made: Sequence[Sample]) -> Minibatch:
    """All of them, with advantages 1 and -1 in turn."""
    advantages = {(s.group_id, s.sample_index): 1.0 - 2.0 * (number % 2) for number, s in enumerate(made)}
    return Minibatch(advantages=advantages, counts=Counts(num_tokens=sum(s.num_trained_tokens for s in made), num_sequences=len(made)))


def flops(config: Any, rows: Sequence[Row]) -> float:
    """Of forward and backward, without what is computed twice: 6 a weight and token, the head for trained tokens only, 12 a visible pair, head and width."""
    hidden, heads, key_heads, width = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = hidden * width * (2 * heads + 2 * key_heads) + 3 * hidden * config.intermediate_size
    tokens, targets = sum(row.ids.numel() for row in rows), sum(row.num_targets for row in rows)
    pairs = sum(int((ranges.prefix_end - ranges.prefix_start).clamp(min=0).sum() + (torch.arange(row.ids.numel()) - ranges.own_start + 1).sum()) for row in rows for ranges in [reach(row.document, row.branch)])
    total: float = 6.0 * layer * config.num_hidden_layers * tokens + 6.0 * config.vocab_size * hidden * targets + 12.0 * config.num_hidden_layers * heads * width * pairs
    return total
