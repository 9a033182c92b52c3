"""A gateway that is killed comes back beside its actors and trainer; a trainer that comes back goes back to the newest cut."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from learner.config import LearnerConfig
from protos.learner.v1alpha1 import feed_pb2, learner_pb2
from tests.learner.gateway.gateway_harness import Actor, Child, Trainer, config_in, running, sample

ACCEPTED, DUPLICATE = learner_pb2.RECEIPT_STATUS_ACCEPTED, learner_pb2.RECEIPT_STATUS_DUPLICATE
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[tuple[Child, LearnerConfig]]:
    config = config_in(tmp_path)
    process = Child(config)
    yield process, config
    if process.process is not None and process.process.returncode is None:
        process.process.kill()
        await process.process.wait()


async def balances(actor: Actor) -> learner_pb2.GetStatusResponse:
    """The status, whose account must balance."""
    status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest(), wait_for_ready=True, timeout=10)
    assert status.num_leased == status.num_trained + sum(status.num_dropped.values()) + status.num_open
    return status


async def test_a_sample_journaled_but_not_acknowledged_is_a_duplicate_after_the_restart(child: tuple[Child, LearnerConfig], tmp_path: Path) -> None:
    process, config = child
    address = await process.start(fault="after_fsync_before_receipt=kill")
    trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
    await trainer.register()
    await trainer.close(0)
    await actor.attend()
    first, second = await actor.lease(max_groups=2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await actor.submit(sample(first, 0, 1, reward=0.0))
    assert caught.value.code() in GONE
    await process.killed()
    await actor.leave()
    await process.start()
    actor = Actor(address, config)
    await actor.attend()
    back_s = process.processor_s()
    assert [r.status for r in await actor.submit(sample(first, 0, 1, reward=0.0), sample(first, 1, 1))] == [DUPLICATE, ACCEPTED]
    await actor.fulfil(second)
    header, rows = await trainer.take(0)
    assert [(row.group_id, row.sample_index) for row in rows] == [(first.group_id, 0), (first.group_id, 1), (second.group_id, 0), (second.group_id, 1)]
    assert [row.reward for row in header.table] == [0.0, 1.0, 0.0, 1.0]
    status = await balances(actor)
    assert (status.num_leased, status.num_open) == (2, 2)
    # A killed gateway is back within 2 s. It starts on one processor and waits for nothing, so its processor time is what that takes on a machine
    # of its own; the clock is benchmarks/recovery.py's to read.
    assert back_s < 2.0, f"back after {back_s:.1f} s of processor time"
    assert await process.stop() == 0
    await actor.leave()


async def test_a_plan_that_no_rank_heard_of_is_given_after_the_restart(child: tuple[Child, LearnerConfig], tmp_path: Path) -> None:
    process, config = child
    address = await process.start(fault="after_plan_before_answer=kill")
    trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
    await trainer.register()
    await trainer.close(0)
    await actor.attend()
    leases = await actor.lease(max_groups=3)
    for lease in leases[:2]:
        await actor.fulfil(lease)
    with pytest.raises(grpc.aio.AioRpcError):
        await trainer.take(0)
    await process.killed()
    await process.start()
    header, rows = await trainer.take(0)
    assert {row.group_id for row in header.table} == {lease.group_id for lease in leases[:2]} and len(rows) == 4
    await trainer.close(1)
    assert (await balances(actor)).num_trained == 2
    await actor.leave()


async def test_a_version_published_but_not_answered_is_the_same_after_the_restart(child: tuple[Child, LearnerConfig], tmp_path: Path) -> None:
    process, config = child
    address = await process.start(fault="after_close_before_answer=kill")
    trainer = Trainer(address, tmp_path / "shm")
    await trainer.register()
    with pytest.raises(grpc.aio.AioRpcError):
        await trainer.close(0, data=b"the policy")
    await process.killed()
    await process.start()
    actor = Actor(address, config)
    assert (await actor.attend()).newest_version == 1  # and it can be fetched, though nobody published again
    chunks = [part.chunk.data async for part in actor.stub.FetchWeights(learner_pb2.FetchWeightsRequest()) if part.HasField("chunk")]
    assert b"".join(chunks) == b"the policy"
    assert (await trainer.close(0)).version == 1
    await actor.leave()


async def one_step(trainer: Trainer, actor: Actor, step: int, *, will_save: bool = False) -> tuple[list[str], int]:
    """Groups of a batch, and the version that closing it published."""
    newest = (await actor.stub.GetStatus(learner_pb2.GetStatusRequest())).newest_version
    for lease in await actor.lease(max_groups=2):
        await actor.fulfil(lease, version=newest)
    header, _ = await trainer.take(step)
    version = (await trainer.close(step + 1, will_save=will_save)).version
    return sorted({row.group_id for row in header.table}), version


async def test_a_trainer_that_comes_back_replays_from_the_newest_cut_and_no_version_is_used_twice(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        first = await trainer.register()
        assert (first.cut_dir, first.policy_step, first.lineage) == ("", 0, 0)
        versions = [(await trainer.close(0)).version]
        await actor.attend()
        groups, version = await one_step(trainer, actor, 0, will_save=True)
        versions.append(version)
        cut_dir = await trainer.save(1, config.run_dir)
        assert Path(cut_dir).name == "step-000001" and (Path(cut_dir) / "cut.json").is_file() and (Path(cut_dir) / "ledger.msgpack").is_file()
        assert await trainer.save(1, config.run_dir) == cut_dir
        dead_groups, version = await one_step(trainer, actor, 1, will_save=True)
        versions.append(version)

        again = Trainer(address, tmp_path / "shm", incarnation=200)
        answer = await again.register()
        assert (answer.cut_dir, answer.policy_step, answer.lineage) == (cut_dir, 1, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await again.save(2, config.run_dir)  # the older incarnation announced it, the account at that step is no more
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.take(2)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        versions.append((await again.close(1)).version)
        header, rows = await again.take(1)
        assert sorted({row.group_id for row in header.table}) == dead_groups != groups and len(rows) == 4
        versions.append((await again.close(2)).version)
        assert versions == [1, 2, 3, 4, 5]
        status = await balances(actor)
        assert (status.num_trained, status.policy_step, status.lineage) == (4, 2, 1)
        await actor.leave()


async def test_a_rollback_that_no_rank_heard_of_stands_after_the_restart(child: tuple[Child, LearnerConfig], tmp_path: Path) -> None:
    process, config = child
    address = await process.start(fault="after_rollback_before_answer=kill@2")
    trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
    await trainer.register()
    await trainer.close(0)
    await actor.attend()
    groups, _ = await one_step(trainer, actor, 0)
    again = Trainer(address, tmp_path / "shm", incarnation=200)
    with pytest.raises(grpc.aio.AioRpcError):
        await again.register()
    await process.killed()
    await process.start()
    answer = await again.register()
    assert (answer.cut_dir, answer.policy_step, answer.lineage) == ("", 0, 1)
    assert (await again.close(0)).version == 3
    header, _ = await again.take(0)
    assert sorted({row.group_id for row in header.table}) == groups
    await actor.leave()


async def test_a_gateway_that_starts_from_a_cut_gives_versions_and_sequence_numbers_no_second_time(tmp_path: Path) -> None:
    # faults.md 35, 114
    config = config_in(tmp_path, checkpoint={"every_steps": 1, "keep": 1})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        await trainer.register()
        await trainer.close(0)
        await actor.attend()
        for step in range(3):
            await one_step(trainer, actor, step, will_save=True)
            await trainer.save(step + 1, config.run_dir)
        before = await balances(actor)
        await actor.leave()
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-000003"]
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm", incarnation=300), Actor(address, config)
        assert (await trainer.register()).policy_step == 3
        assert (await trainer.close(3)).version == 5  # 1 to 4 were published by the run before
        await actor.attend(loaded_version=5)
        after = await balances(actor)
        assert (after.num_leased, after.num_trained, after.num_open) == (before.num_leased, before.num_trained, before.num_open) == (6, 6, 0)
        assert (await actor.lease())[0].seq == 6
        await actor.leave()


async def test_a_kill_before_the_marker_leaves_the_cut_before(child: tuple[Child, LearnerConfig], tmp_path: Path) -> None:
    process, config = child
    address = await process.start(fault="before_cut_marker=kill")
    trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
    await trainer.register()
    await trainer.close(0)
    await actor.attend()
    await one_step(trainer, actor, 0, will_save=True)
    with pytest.raises(grpc.aio.AioRpcError):
        await trainer.save(1, config.run_dir)
    await process.killed()
    await actor.leave()
    await process.start()
    cut_dir = await trainer.save(1, config.run_dir)  # the account at that step was rebuilt from the journal
    assert Path(cut_dir).name == "step-000001"
    again = Trainer(address, tmp_path / "shm", incarnation=200)
    assert (await again.register()).policy_step == 1


async def test_a_save_that_was_not_announced_or_failed_is_no_cut(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        trainer = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm")
        await trainer.register()
        await trainer.close(0, will_save=True)
        await trainer.stub.SaveCut(feed_pb2.SaveCutRequest(incarnation=100, policy_step=0, error="disk full"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.save(0, config.run_dir)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_register_waits_for_all_ranks_and_refuses_old_incarnations_and_another_world(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        trainer = Trainer(f"127.0.0.1:{gateway.port}", tmp_path / "shm", world_size=2)
        first = trainer.stub.Register(feed_pb2.RegisterRequest(incarnation=100, rank=0, world_size=2))
        await asyncio.sleep(0.2)
        assert not first.done()
        second = await trainer.stub.Register(feed_pb2.RegisterRequest(incarnation=100, rank=1, world_size=2))
        assert await first == second and second.run_id == "r1"
        for request in (feed_pb2.RegisterRequest(incarnation=99, rank=0, world_size=2), feed_pb2.RegisterRequest(incarnation=100, rank=0, world_size=3)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await trainer.stub.Register(request)
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_replica_that_does_not_come_back_after_a_restart_loses_its_leases_and_one_that_does_keeps_them(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, gone, stays = Trainer(address, tmp_path / "shm"), Actor(address, config, "a"), Actor(address, config, "b")
        await trainer.register()
        await trainer.close(0)
        await gone.attend()
        await stays.attend()
        lost, kept = (await gone.lease())[0], (await stays.lease(max_groups=3))[0]
        shutil.copytree(config.run_dir, tmp_path / "as it was")  # a kill, not a stop: no stream is seen to end
        for actor in (gone, stays):
            await actor.leave()
    shutil.rmtree(config.run_dir)
    (tmp_path / "as it was").rename(config.run_dir)
    async with running(config) as gateway:
        back = Actor(f"127.0.0.1:{gateway.port}", config, "b")
        await back.attend()
        assert await back.lease(wait_s=0.2) == []
        again = (await back.lease(wait_s=5.0))[0]  # silence_s is 1
        assert (again.group_id, again.attempt) == (lost.group_id, 2)
        status = await back.stub.GetStatus(learner_pb2.GetStatusRequest())
        assert status.replicas[0].num_leases == 4
        assert await back.fulfil(kept) == [ACCEPTED, ACCEPTED]
        await back.leave()
