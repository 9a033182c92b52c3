"""On a real vLLM with a KV cache for about a third of its places: the limit settles without a storm of preemptions, near the best fixed number."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import pytest

from protos.arrays import pack_ids
from protos.learner.v1alpha1 import learner_pb2
from rollout_server.concurrency import Window
from rollout_server.config import RolloutConfig
from rollout_server.service import Service
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server.fakes import FakeLearner, FakeReward, a_lease

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]

GROUP, MOST = 4, 32
FIXED = (4, 8, 12, 16, 32)
NUM_GROUPS = 24  # of one phase


def lease(number: int) -> learner_pb2.Lease:
    """A prompt of its own of three KV blocks, and 30 to 160 tokens for each sample."""
    rng = random.Random(number)
    made = a_lease(number, group_size=GROUP, max_new_tokens=rng.randint(30, 160))
    made.prompt_ids.CopyFrom(pack_ids([rng.randrange(3, 259) for _ in range(70)]))
    return made


async def test_it_settles_near_the_best_fixed_number_and_groups_share_their_prompt(tiny_model: Path, learner: FakeLearner, reward: FakeReward) -> None:
    # 1 MiB of KV: 64 blocks of 32 tokens; a request of 70 + 95 tokens in the mean ends with 6, the first two of which its group shares.
    config = RolloutConfig(
        model=str(tiny_model), max_model_len=256, max_num_seqs=MOST, kv_cache_bytes=1 << 20, threads=1, learner=f"127.0.0.1:{learner.port}", rewards=(f"127.0.0.1:{reward.port}",)
    )  # fmt: skip
    service = Service(config, tiny_model, VllmEngine(config, tiny_model))
    serving, replica = asyncio.create_task(service.serve()), service.replica
    learner.publish(1, tiny_model)
    numbers = iter(range(1, 100_000))

    async def phase(window: Window, num_groups: int) -> dict[str, float]:
        """Draws so many groups, and what it took; the last places stay empty in every phase alike."""
        replica.window = window
        before, num_before = replica.engine.stats(), len(learner.submitted)
        began_s = time.monotonic()
        await learner.lend(*[lease(next(numbers)) for _ in range(num_groups)])
        await learner.until(lambda: len(learner.submitted) >= num_before + num_groups * GROUP, limit_s=300)
        after = replica.engine.stats()
        seconds = time.monotonic() - began_s
        return {
            "tokens_per_s": round(((after.num_drawn or 0) - (before.num_drawn or 0)) / seconds, 1),
            "preempted_per_sample": round(((after.num_preempted or 0) - (before.num_preempted or 0)) / (num_groups * GROUP), 3),
            "prefix_hit_share": round(((after.num_prefix_hit_tokens or 0) - (before.num_prefix_hit_tokens or 0)) / max(1, (after.num_prefix_tokens or 0) - (before.num_prefix_tokens or 0)), 3),
            "limit": replica.limit,
        }  # fmt: skip

    try:
        async with asyncio.timeout(200):
            while not (replica.life and replica.engine.loaded_version):
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.1)
        await phase(Window.fixed(8), 4)  # warm
        fixed = {limit: await phase(Window.fixed(limit), NUM_GROUPS) for limit in FIXED}
        first = await phase(Window.first(most=MOST, want=GROUP), NUM_GROUPS)
        settled = await phase(replica.window, 2 * NUM_GROUPS)
        print(json.dumps({"fixed": fixed, "adaptive_first": first, "adaptive_settled": settled}))
        best = max(each["tokens_per_s"] for each in fixed.values())
        assert settled["tokens_per_s"] >= 0.75 * best  # load beside the test makes phases unequal; the figures are printed
        assert settled["preempted_per_sample"] < fixed[MOST]["preempted_per_sample"]
        assert 4 <= settled["limit"] < MOST
        assert settled["prefix_hit_share"] >= 0.5  # three of four samples of a group find 64 of their 70 tokens: 0.69 at best
    finally:
        service.stop()
        await asyncio.wait_for(serving, 90)
