"""With metrics_address vLLM's scheduler tells of its queue, KV cache and preemptions; without, it is not asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_server.config import RolloutConfig
from rollout_server.engine import SamplingSpec
from rollout_server.vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


async def drawn(tiny_model: Path, metrics_address: str) -> VllmEngine:
    """An engine that has drawn 16 tokens, stopped again by the caller."""
    config = RolloutConfig(model=str(tiny_model), max_model_len=128, max_num_seqs=4, kv_cache_bytes=8 << 20, threads=1, metrics_address=metrics_address)
    engine = VllmEngine(config, tiny_model)
    await engine.start()
    async for delta in engine.generate([65, 66, 67], SamplingSpec(temperature=1.0, max_new_tokens=16, seed=1), "one", stream=False):
        assert len(delta.token_ids) == 16 and delta.finish == "length"
    return engine


async def test_the_scheduler_tells_where_figures_are_wanted(tiny_model: Path) -> None:
    engine = await drawn(tiny_model, "127.0.0.1:0")
    try:
        stats = engine.stats()
        assert stats.num_tokens == 16 and stats.num_waiting == 0 and stats.num_preempted == 0
        assert stats.kv_use is not None and 0 <= stats.kv_use <= 1
    finally:
        await engine.stop()


async def test_it_is_not_asked_where_they_are_not(tiny_model: Path) -> None:
    engine = await drawn(tiny_model, "")
    try:
        stats = engine.stats()
        assert (stats.num_tokens, stats.num_waiting, stats.kv_use, stats.num_preempted) == (16, None, None, None)
    finally:
        await engine.stop()
