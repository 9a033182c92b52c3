"""Callers that leave in the middle of a close, and runs whose time is up when they come back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.learner.gateway.gateway_harness import Trainer, config_in, eventually
from tests.learner.gateway.scenes import begun


async def test_a_close_whose_caller_left_is_finished_and_may_still_be_saved(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with begun(config, tmp_path) as at:
        await at.sample(2)
        await at.trainer.take(0)
        disk, write = threading.Event(), at.gateway._journal._write
        at.gateway._journal._write = lambda batch: disk.wait(20) and write(batch)  # type: ignore[method-assign, assignment, return-value]
        leaving = asyncio.create_task(at.trainer.close(1, will_save=True))
        await eventually(lambda: at.gateway._books.ledger.step == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.1)  # for the cancellation to arrive
        disk.set()
        assert (await at.trainer.close(1, will_save=True)).version == 2
        assert await at.trainer.save(1, config.run_dir) == str(config.run_dir / "checkpoints" / "step-000001")


async def test_a_run_whose_time_is_up_replays_what_was_trained_past_its_cut_before_it_ends(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with begun(config, tmp_path) as at:
        await at.sample(2)
        first, _ = await at.trainer.take(0)
        await at.trainer.close(1)
        at.gateway.feed._batches._is_over = lambda: True
        again = Trainer(at.address, tmp_path / "shm", incarnation=200)
        assert (await again.register()).policy_step == 0  # no cut: step 1 is lost unless it is replayed
        await again.close(0)
        header, _ = await again.take(0)
        assert not header.end_of_run and [row.group_id for row in header.table] == [row.group_id for row in first.table]
        await again.close(1)
        assert (await again.take_end(1, config.run_dir)).end_of_run
