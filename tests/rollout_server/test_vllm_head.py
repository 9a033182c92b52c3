"""Real vLLM with float32 logits over a bfloat16 model, as trainer.head_dtype=float32 computes them, before and after an update."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def half(folder: Path, out: Path, seed: int) -> Path:
    """The tiny model with other weights, in bfloat16, its layers adding nothing: hidden states are the same in every engine, and the head alone can differ."""
    reference.perturbed(folder, out, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1)
    model.save_pretrained(out)
    return out


def logprobs(folder: Path, prompt: list[int], ids: list[int], *, rounded: bool) -> torch.Tensor:
    """Of each id: bfloat16 hidden states, logits rounded to it or not."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.inference_mode():
        hidden = model.model(torch.tensor([[*prompt, *ids]])).last_hidden_state[0]
        head = model.lm_head.weight
        logits = (hidden @ head.t()).float() if rounded else hidden.float() @ head.float().t()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_logits_are_float32_and_follow_an_update_of_the_head(tiny_model: Path, tmp_path: Path) -> None:
    # faults.md 45: no cast copy of the head goes stale; the tied embedding stays bfloat16
    base, other = half(tiny_model, tmp_path / "base", 1), half(tiny_model, tmp_path / "other", 2)
    prompt = [10 + i for i in range(20)]

    async def scene() -> tuple[list[tuple[list[int], list[float]]], str]:
        engine = VllmEngine(RolloutConfig(model=str(base), dtype="bfloat16", head_dtype="float32", max_model_len=256, kv_cache_bytes=64 << 20, threads=1), base)
        await engine.start()
        try:
            seen = []
            for version in (0, 1):
                if version:
                    await reference.stage(engine, other, version)
                    await engine.commit(version)
                sample = await reference.Sample(engine, prompt, f"s{version}", temperature=1.0, max_new_tokens=100, seed=7).task
                seen.append((sample.ids, list(sample.logprobs)))
            return seen, str(engine.info)
        finally:
            await engine.stop()

    seen, _ = asyncio.run(scene())
    for folder, (ids, found) in zip((base, other), seen, strict=True):
        ours, rounded = ((torch.tensor(found) - logprobs(folder, prompt, ids, rounded=rounding)).abs().max() for rounding in (False, True))
        assert float(ours) < 2e-5 and float(rounded) > 1e-3, folder
