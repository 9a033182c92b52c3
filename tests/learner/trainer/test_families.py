"""Packed log-probs equal transformers' own unpacked forward, family by family; what cannot be packed is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner.trainer.packing import WeightedSample, pack
from tests.learner.trainer import rig

SIZES: dict[str, Any] = {
    "vocab_size": rig.VOCABULARY, "hidden_size": 36, "intermediate_size": 51, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Windows of 3 and 4 tokens are far shorter than the samples' 3 to 14.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, biases everywhere": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}),  # biases of query, key and value by itself
    "qwen2 tied": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2 with windows": ("Qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 untied, biases": ("Qwen3", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 3}),
    "mistral without windows, tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {}),  # all of Gemma are tied
    "gemma untied": ("Gemma", {"tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"sliding_window": 3, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3Text", {"sliding_window": 3, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def made(folder: Path, family: str) -> Path:
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases begin at 0, norms at 0 or 1: left out, nobody would see it
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_equal_transformers_unpacked_forward(family: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", family)
    samples = rig.samples(3, 4)
    policy = rig.policy(folder, mesh)
    config: Any = policy.causal_lm.config
    names = [name for name, _ in policy.causal_lm.named_parameters()]
    assert ("lm_head.weight" in names) == (not config.tie_word_embeddings) and any(name.endswith("bias") for name in names) == ("biases" in family or "qwen2" in family)
    reference = {float(b): float(lp) for s in samples for b, lp in zip(s.behaviour, rig.reference_logprobs(folder, s), strict=True)}
    apart = 0.0
    with torch.no_grad():
        for row in pack([WeightedSample(sample=s, advantage=1.0) for s in samples], row_tokens=40, share_prefix=True):
            expected = torch.tensor([reference[float(b)] for b in row.behaviour])
            found = policy(row)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            apart = max(apart, float((found - expected).abs().max()))
    print(f"{family}: {apart:.1e} nat")  # pytest -s


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"), ({"logits_scaling": 8.0}, "logits_scaling=8.0"), ({"use_bidirectional_attention": True}, "use_bidirectional_attention")],
)
def test_what_cannot_be_packed_is_refused_by_name(changes: dict[str, Any], says: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for key, value in changes.items():
        setattr(model.config, key, value)
    from learner.trainer.model import refuse_unknown_forms

    with pytest.raises(ValueError, match=says):
        refuse_unknown_forms(model)
