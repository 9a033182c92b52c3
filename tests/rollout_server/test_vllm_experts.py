"""An engine that stores experts in another layout than the checkpoint's takes the checkpoint's tensors again and again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [10 + i % 200 for i in range(40)]


def two_experts(folder: Path, tokenizer: Path, *, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_experts=2, num_experts_per_tok=1, norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=259, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


async def test_the_same_bytes_twice_change_nothing_or_updates_are_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    # faults.md 10, of two experts. vLLM 0.32 on a CPU does not get its packed experts back: then every update is refused, and the old weights serve.
    one, other = (two_experts(tmp_path / f"{seed}", tiny_model, seed=seed) for seed in (1, 2))
    engine = VllmEngine(RolloutConfig(model=str(one), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1), one)
    await engine.start()
    refused = []
    try:
        drawn = []
        for version, folder in ((0, None), (1, one), (2, one), (3, other), (4, one)):
            if folder is not None:
                try:
                    await reference.update(engine, folder, version)
                except Exception as error:
                    refused.append(str(error))
            drawn.append(await Sample(engine, PROMPT, f"v{version}", temperature=0.0, max_new_tokens=24, seed=5).task)
    finally:
        await engine.stop()
    print({"apply": engine.apply_reason, "refused": refused})
    for sample in (drawn[1], drawn[2], drawn[4]):
        assert (sample.ids, sample.logprobs) == (drawn[0].ids, drawn[0].logprobs)
    if refused:
        assert len(refused) == 4 and all("cannot take them again" in error for error in refused) and "experts" in engine.apply_reason and engine.loaded_version == 0
        assert largest_difference(drawn[3].logprobs, reference.logprobs(reference.load(one), PROMPT, drawn[3].ids)) < 1e-4
    else:
        assert largest_difference(drawn[3].logprobs, reference.logprobs(reference.load(other), PROMPT, drawn[3].ids)) < 1e-4
