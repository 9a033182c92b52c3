"""The emulated rank does what the gateway orders, as a real one would."""

from __future__ import annotations

from pathlib import Path

from benchmarks._emulated import Rank, config_in
from learner.gateway import cuts, saving
from tests.learner.gateway.gateway_harness import Actor, running


async def test_an_emulated_rank_makes_the_cut_that_a_full_journal_asks_for_and_trains_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(saving, "CHECK_S", 0.0)
    config = config_in(
        tmp_path, prompt_tokens=4, groups_per_step=2, sampling={"group_size": 2, "max_new_tokens": 8}, journal={"max_groups": 6}, checkpoint={"every_steps": None}, lease={"heartbeat_s": 0.1, "silence_s": 5.0}
    )
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        rank, actor = Rank(address, tmp_path), Actor(address, config)
        await rank.register()
        await actor.attend()
        for step in range(4):
            for lease in await actor.lease(max_groups=4, wait_s=0.5):
                await actor.fulfil_as(lease, config.run_id, version=step + 1)
            header, rows = await rank.take(step)
            assert header.num_rows == len(rows) == 4
            await rank.close(step + 1)
        await rank.leave()
        await actor.leave()
    assert cuts.all_marked(config.run_dir / "checkpoints")
