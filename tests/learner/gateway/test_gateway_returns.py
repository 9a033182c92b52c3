"""Callers that leave in the middle of a close, and runs whose time is up when they come back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, eventually, running


async def test_a_close_whose_caller_left_is_finished_and_may_still_be_saved(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        await trainer.register()
        await trainer.close(0)
        await actor.attend()
        for lease in await actor.lease(max_groups=2):
            await actor.fulfil(lease)
        await trainer.take(0)
        disk, write = threading.Event(), gateway._journal._write
        gateway._journal._write = lambda batch: disk.wait(20) and write(batch)  # type: ignore[method-assign, assignment, return-value]
        leaving = asyncio.create_task(trainer.close(1, will_save=True))
        await eventually(lambda: gateway._books.ledger.step == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.1)  # for the cancellation to arrive
        disk.set()
        assert (await trainer.close(1, will_save=True)).version == 2
        assert await trainer.save(1, config.run_dir) == str(config.run_dir / "checkpoints" / "step-000001")
        await actor.leave()


async def test_a_run_whose_time_is_up_replays_what_was_trained_past_its_cut_before_it_ends(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        await trainer.register()
        await trainer.close(0)
        await actor.attend()
        for lease in await actor.lease(max_groups=2):
            await actor.fulfil(lease)
        first, _ = await trainer.take(0)
        await trainer.close(1)
        gateway.feed._batches._is_over = lambda: True
        again = Trainer(address, tmp_path / "shm", incarnation=200)
        assert (await again.register()).policy_step == 0  # no cut: step 1 is lost unless it is replayed
        await again.close(0)
        header, _ = await again.take(0)
        assert not header.end_of_run and [row.group_id for row in header.table] == [row.group_id for row in first.table]
        await again.close(1, will_save=True)
        await again.save(1, config.run_dir)
        assert (await again.take(1))[0].end_of_run
        await actor.leave()
