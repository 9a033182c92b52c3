"""Cuts that stand alone, a journal that is full, ranks that were told to stop: what the gateway makes of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from learner.config import KeepBest
from learner.gateway import cut_payloads, cuts, saving
from learner.gateway.batches import LAST_TRIES
from learner.gateway.best import best_step
from protos.learner.v1alpha1 import feed_pb2, learner_pb2
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, eventually, running, sample
from tests.learner.gateway.scenes import begun
from tests.redis_server import RedisServer

ONE_STALE: dict[str, Any] = {"staleness": {"max_staleness": 1}}


async def two_steps_and_a_half(config: Any, folder: Path, *, cut_at: int = 1) -> tuple[list[str], list[str]]:
    """Trains steps 0 and 1 with a cut after the first; (groups of step 1, groups complete and open at the cut)."""
    async with begun(config, folder) as at:
        trainer, actor = at.trainer, at.actor
        leases = await actor.lease(max_groups=4)
        assert len(leases) == 4
        for lease in leases[:3]:
            await actor.fulfil(lease)
        await actor.submit(sample(leases[3], 1, 1))  # one sample of two: an open group with half of its payloads
        await trainer.take(0)
        await trainer.close(1, will_save=True)
        await actor.submit(sample(leases[3], 0, 1, reward=0.0))  # after the cut's moment
        await trainer.save(1, config.run_dir)
        header, _ = await trainer.take(1)
        await trainer.close(2)
        return sorted({row.group_id for row in header.table}), [leases[2].group_id, leases[3].group_id]


async def test_a_cut_holds_the_payloads_that_were_open_at_its_moment(tmp_path: Path) -> None:
    config = config_in(tmp_path, **ONE_STALE)
    _, (whole, half) = await two_steps_and_a_half(config, tmp_path)
    folder = config.run_dir / "checkpoints" / "step-000001"
    held = dict(cut_payloads.read(folder / "payloads.bin"))
    assert sorted(held) == [(whole, 0), (whole, 1), (half, 1)]
    account = cuts.read_account(cuts.all_marked(folder.parent)[0])
    # What DESIGN 9 names and is not the ranks': prompt cursor, statistics, journal position, prompts' identity.
    assert account["account"]["next_seq"] == 4 and account["account"]["num_trained"] == 2
    assert account["account"]["tokens_by_staleness"] == [[0, 12]]
    assert account["fingerprint"] and json.loads((folder / "cut.json").read_text())["offset"] > 0


async def test_a_copied_cut_restores_without_its_journal(tmp_path: Path) -> None:
    first = config_in(tmp_path, **ONE_STALE)
    _, (whole, half) = await two_steps_and_a_half(first, tmp_path)
    second = config_in(tmp_path, run_dir=tmp_path / "other", run_id="r2", **ONE_STALE)
    shutil.copytree(first.run_dir / "checkpoints", second.run_dir / "checkpoints")
    for life in range(2):  # the second life continues the journal that the first began
        async with running(second) as gateway:
            address = f"127.0.0.1:{gateway.port}"
            trainer, actor = Trainer(address, tmp_path / "shm", incarnation=500 + life), Actor(address, second, incarnation=10 + life)
            answer = await trainer.register()
            assert (answer.policy_step, Path(answer.cut_dir).name) == (1, "step-000001")
            version = (await trainer.close(1)).version
            assert version == 3 + life  # 1 and 2 were published before the cut
            await actor.attend(loaded_version=version)
            if life == 0:
                again = await actor.lease(max_groups=1)  # at once: that life's replica is no replica of this run
                assert [(lease.group_id, list(lease.done)) for lease in again] == [(half, [1])]
                await actor.submit(sample(again[0], 0, version, reward=0.0), run_id="r2")
            header, rows = await trainer.take(1)
            assert {row.group_id for row in header.table} == {whole, half}
            assert [row.reward for row in header.table] == [0.0, 1.0, 0.0, 1.0] and len(rows) == 4
            assert (await actor.stub.GetStatus(learner_pb2.GetStatusRequest())).num_trained == 2
            await actor.leave()


async def test_a_run_that_lost_its_journal_goes_on_from_its_cut_and_uses_no_version_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_in(tmp_path, **ONE_STALE)
    await two_steps_and_a_half(config, tmp_path)
    shutil.rmtree(config.run_dir / "journal")
    async with running(config) as gateway:
        trainer = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm", incarnation=500)
        await trainer.register()
        # faults.md 35: 3 was published after the cut, and the account that knows of it is gone
        assert (await trainer.close(1)).version == 1_000_003
    assert "going on from the cut" in caplog.text and "without what came after it" in caplog.text


async def test_a_journal_of_another_life_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path, **ONE_STALE)
    await two_steps_and_a_half(config, tmp_path)
    other = config_in(tmp_path, run_dir=tmp_path / "other", run_id="r1", **ONE_STALE)
    async with running(other) as gateway:
        await Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm").register()
    shutil.copytree(config.run_dir / "checkpoints", other.run_dir / "checkpoints", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="does not hold the record.*new run_dir"):
        async with running(other):
            pass


async def test_a_damaged_payload_of_a_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "payloads.bin"
    assert cut_payloads.write(path, [("g00000000", 0), ("g00000001", 1)], lambda key: key[0].encode() * 10) == 2
    whole = path.read_bytes()
    for data, words in ((whole[:-3], "checksum"), (whole[:-20], "not whole"), (whole[:60] + b"\xff" + whole[61:], "payload 0"), (b"HEADRPAY\x09\0\0\0", "schema 9")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            list(cut_payloads.read(path))


async def test_the_gateway_goes_on_from_redis_after_it_was_stopped(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        config = config_in(tmp_path, journal={"backend": "redis", "url": server.url}, **ONE_STALE)
        groups, _ = await two_steps_and_a_half(config, tmp_path)
        async with running(config) as gateway:
            address = f"127.0.0.1:{gateway.port}"
            trainer, actor = Trainer(address, tmp_path / "shm", incarnation=500), Actor(address, config, incarnation=7)
            assert (await trainer.register()).policy_step == 1
            await trainer.close(1)
            header, rows = await trainer.take(1)  # the plan of before, with the payloads of before the cut and after it
            assert sorted({row.group_id for row in header.table}) == groups and len(rows) == 4
            await actor.leave()


# The journal is full


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_S", 0.3)
    monkeypatch.setattr(saving, "CHECK_S", 0.0)


async def test_a_full_journal_blocks_training_until_a_cut_succeeds(tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    config = config_in(tmp_path, journal={"max_groups": 6}, checkpoint={"every_steps": None}, **ONE_STALE)
    async with begun(config, tmp_path) as at:
        trainer, step, version = at.trainer, 0, 1
        while True:
            await at.sample(4, version=version)
            header, _ = await trainer.take(step)
            if header.save_first:
                break
            step += 1
            version = (await trainer.close(step)).version
        assert step == 1 and not header.leave and not header.table  # 2 trained and 4 open are 6
        await at.failed_save(step)
        asked = asyncio.create_task(trainer.take(step))
        await asyncio.sleep(0.15)
        assert not asked.done()  # blocks; the alarm says why
        assert "the journal is full (6 groups" in caplog.text and "training waits for a cut" in caplog.text
        header, _ = await asked
        assert header.save_first  # tried again after a while
        await trainer.save(step, config.run_dir)
        header, rows = await trainer.take(step)
        assert len({row.group_id for row in header.table}) == 2 and len(rows) == 4 and not header.save_first


@pytest.mark.parametrize("again", [True, False])
async def test_an_order_to_save_first_outlives_a_restart(tmp_path: Path, impatient: None, again: bool) -> None:
    config = config_in(tmp_path, journal={"max_groups": 6}, checkpoint={"every_steps": None}, **ONE_STALE)
    async with begun(config, tmp_path) as at:
        await at.sample(4)
        await at.trainer.take(0)
        await at.trainer.close(1)
        await at.sample(4, version=2)
        assert (await at.trainer.take(1))[0].save_first
    async with running(config) as gateway:
        trainer = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm")
        if again:  # else the ranks had heard it and were saving meanwhile
            assert (await trainer.take(1))[0].save_first
        assert Path(await trainer.save(1, config.run_dir)).name == "step-000001"
        assert (await trainer.take(1))[0].num_rows == 4


# Told to stop


async def test_a_rank_told_to_stop_makes_all_ranks_leave_after_a_cut(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        trainer = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm", world_size=2)
        await trainer.register()
        await trainer.close(0)
        waiting = asyncio.create_task(trainer.take(0, rank=0))
        await asyncio.sleep(0.2)
        call = trainer.stub.TakeBatch(feed_pb2.TakeBatchRequest(incarnation=100, rank=1, policy_step=0, leaving=True), timeout=10)
        headers = [(await waiting)[0], (await call.read()).header]
        assert [(h.save_first, h.leave) for h in headers] == [(True, True)] * 2
        assert Path(await trainer.save(0, config.run_dir)).name == "step-000000"
        header, _ = await trainer.take(0)  # the other rank's order is over, the account goes on from here
        assert header.leave and not header.save_first


async def test_a_batch_that_was_decided_is_trained_before_leaving(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with begun(config, tmp_path) as at:
        await at.sample(2)
        await at.trainer.take(0)
        call = at.trainer.stub.TakeBatch(feed_pb2.TakeBatchRequest(incarnation=100, rank=0, policy_step=0, leaving=True), timeout=10)
        header = (await call.read()).header
        assert not header.leave and header.num_rows == 4


# Retention


def lines(folder: Path, *values: tuple[int, float | None]) -> None:
    text = "".join(json.dumps({"step": step, "evaluation": {"score": value}}) + "\n" for step, value in values)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "evalu')


def marked_cut(run_dir: Path, step: int) -> None:
    source = run_dir / "checkpoints" / f"step-{step:06d}.tmp"
    source.mkdir(parents=True)
    folder = cuts.folder_of(run_dir / "checkpoints", step)
    cuts.write(source, cuts.Cut(folder=folder, run_id="r1", policy_step=step, lineage=0, segment=0, offset=step), {"account": {}}, [], lambda key: b"")


def test_the_best_cut_stays_beside_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        marked_cut(tmp_path, step)
    best = KeepBest(metric="evaluation.score")
    lines(tmp_path, (1, 0.1), (2, 0.9), (2, 0.3), (3, None), (4, 0.3), (7, 5.0))  # step 2 was trained again; no cut of step 7
    assert best_step(tmp_path, best) == 4  # a tie goes to the newer one
    lines(tmp_path, (1, 0.1), (2, 0.9), (4, 0.3))
    assert best_step(tmp_path, best) == 2
    assert best_step(tmp_path, KeepBest(metric="evaluation.score", mode="min")) == 1
    assert best_step(tmp_path, KeepBest(metric="evaluation.other")) is None and best_step(tmp_path, None) is None
    assert cuts.retain(tmp_path / "checkpoints", 1, best=2).policy_step == 4
    assert [cut.policy_step for cut in cuts.all_marked(tmp_path / "checkpoints")] == [2, 4]


async def test_a_save_that_fails_at_the_marker_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    # faults.md 111: the disk is full when the gateway adds its part
    config = config_in(tmp_path)
    async with begun(config, tmp_path, will_save=True) as at:
        trainer = at.trainer
        blocker = config.run_dir / "checkpoints" / "step-000000.tmp" / "payloads.bin"
        blocker.mkdir(parents=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.save(0, config.run_dir)
        assert caught.value.code() == grpc.StatusCode.INTERNAL and "make room or repair the disk" in str(caught.value.details())
        await at.sample(2)
        assert (await trainer.take(0))[0].num_rows == 4
        await eventually(lambda: not cuts.all_marked(config.run_dir / "checkpoints"))


# The end of a run


async def test_a_run_whose_time_is_up_is_cut_before_it_ends(tmp_path: Path, impatient: None) -> None:
    config = config_in(tmp_path, checkpoint={"every_steps": None})
    async with begun(config, tmp_path) as at:
        await at.step(0)
        at.gateway.feed._batches._is_over = lambda: True
        assert (await at.trainer.take_end(1, config.run_dir)).end_of_run
        assert [cut.policy_step for cut in cuts.all_marked(config.run_dir / "checkpoints")] == [1]


async def test_a_run_whose_prompts_are_used_up_is_cut_before_it_ends(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    config = config_in(tmp_path, num_prompts=2, checkpoint={"every_steps": None}, data={"prompts": prompts, "template": "raw", "shuffle": False, "epochs": 1})
    async with begun(config, tmp_path) as at:
        await at.step(0)
        assert (await at.trainer.take_end(1, config.run_dir)).end_of_run


async def test_the_end_waits_for_a_save_that_runs_and_tries_again_where_it_fails(tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_S", 0.1)
    async with begun(config_in(tmp_path, steps=1), tmp_path) as at:
        await at.step(0, will_save=True)
        ending = asyncio.create_task(at.trainer.take(1))
        await asyncio.sleep(0.3)
        assert not ending.done()  # the ranks are writing
        await at.failed_save(1)
        header, _ = await ending
        for _ in range(LAST_TRIES):
            assert header.save_first and not header.end_of_run
            await at.failed_save(1)
            ending = asyncio.create_task(at.trainer.take(1))
            with contextlib.suppress(grpc.aio.AioRpcError):
                header, _ = await ending
        error = ending.exception()
        assert isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.ABORTED
        assert "the run is at its end, step 1, but the cut of it failed 3 times (disk full; the newest cut is none)" in str(error.details())
        again = Trainer(at.address, tmp_path / "shm", incarnation=200)  # the same ranks once there is room
        await again.register()
        await again.close(0)
        await again.take(0)
        await again.close(1)
        assert (await again.take_end(1, at.run_dir)).end_of_run


async def test_nobody_waits_for_ever_for_a_save_whose_end_was_never_reported(tmp_path: Path, impatient: None) -> None:
    async with begun(config_in(tmp_path, steps=1), tmp_path) as at:
        await at.step(0, will_save=True)
        at.gateway._saving._patience_s = 0.2
        assert (await at.trainer.take(1))[0].save_first  # another one is asked for
        assert at.gateway._saving.num_failed == 1
