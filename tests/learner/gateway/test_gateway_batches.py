"""From lease to receipt to batch, over loopback gRPC with fake actors and a fake trainer."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import grpc
import pytest

from protos.arrays import pack_floats, pack_ids
from protos.learner.v1alpha1 import feed_pb2, learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, running, sample

ACCEPTED, DUPLICATE, UNWANTED = learner_pb2.RECEIPT_STATUS_ACCEPTED, learner_pb2.RECEIPT_STATUS_DUPLICATE, learner_pb2.RECEIPT_STATUS_UNWANTED


async def begun(address: str, folder: Path, world_size: int = 1) -> Trainer:
    """A trainer that has published step 0."""
    trainer = Trainer(address, folder / "shm", world_size=world_size)
    await trainer.register()
    await trainer.close(0)
    return trainer


async def test_a_run_goes_from_prompt_to_batch_and_on_to_its_end(tmp_path: Path) -> None:
    config = config_in(tmp_path, steps=2)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        for step in range(2):
            for lease in await actor.lease(max_groups=2):
                assert lease.prompt_text == f"w{2 + lease.seq} w3" and lease.fields["answer"] == lease.seq
                assert (lease.sampling.temperature, lease.sampling.max_new_tokens, list(lease.sampling.stop_token_ids)) == (1.0, 8, [1])
                assert await actor.fulfil(lease, version=step + 1) == [ACCEPTED, ACCEPTED]
            header, rows = await trainer.take(step)
            assert [row.group_id for row in header.table] == [f"g{2 * step + n:08d}" for n in (0, 0, 1, 1)]
            assert [row.reward for row in header.table] == [0.0, 1.0, 0.0, 1.0]
            assert [(row.group_id, row.sample_index) for row in rows] == [(row.group_id, row.sample_index) for row in header.table]
            assert dict(header.stats.tokens_by_staleness) == {0: 12}
            await trainer.close(step + 1)
        assert (await trainer.take_end(2, config.run_dir)).end_of_run
        assert await actor.lease(wait_s=0.1) == []
        await trainer.stub.FinishRun(feed_pb2.FinishRunRequest(incarnation=100))
        assert (await actor.order("run_finished")).reason == "the run is finished"
        await actor.leave()


async def test_two_ranks_get_the_same_table_and_disjoint_rows_that_cover_it(tmp_path: Path) -> None:
    config = config_in(tmp_path, groups_per_step=4)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path, world_size=2), Actor(address, config)
        await actor.attend()
        for lease in await actor.lease(max_groups=4):
            await actor.fulfil(lease)
        (header, rows), (other_header, other_rows) = await asyncio.gather(trainer.take(0, rank=0), trainer.take(0, rank=1))
        assert header.table == other_header.table and header.stats == other_header.stats
        mine, theirs = ({(row.group_id, row.sample_index) for row in part} for part in (rows, other_rows))
        assert not mine & theirs and mine | theirs == {(row.group_id, row.sample_index) for row in header.table}
        assert {group for group, _ in mine}.isdisjoint(group for group, _ in theirs)
        assert (len(rows), len(other_rows)) == (header.num_rows, other_header.num_rows) == (4, 4)
        again, _ = await trainer.take(0, rank=1)
        assert again == other_header
        await actor.leave()


async def test_a_lapsed_lease_keeps_its_seq_and_the_first_sample_wins(tmp_path: Path) -> None:
    config = config_in(tmp_path, lease={"heartbeat_s": 0.1, "silence_s": 5.0, "lapse_s": 0.4, "max_attempts": 3})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        await begun(address, tmp_path)
        slow, fast = Actor(address, config, "a"), Actor(address, config, "b")
        await slow.attend()
        await fast.attend()
        first = (await slow.lease())[0]
        assert (await slow.submit(sample(first, 0, 1)))[0].status == ACCEPTED
        second = None
        while second is None:  # the lease of 0.4 s lapses; new groups come first only until then
            second = next((lease for lease in await fast.lease(max_groups=8, wait_s=0.2) if lease.group_id == first.group_id), None)
        assert (second.seq, second.attempt, list(second.done)) == (first.seq, 2, [0])
        assert (await slow.submit(sample(first, 1, 1)))[0].status == ACCEPTED  # late, but first
        assert (await fast.submit(sample(second, 1, 1)))[0].status == DUPLICATE
        assert (await fast.submit(sample(second, 0, 1)))[0].status == DUPLICATE
        for actor in (slow, fast):
            await actor.leave()


async def test_what_cannot_be_trained_on_is_in_the_table_with_its_reason_and_in_no_rows(tmp_path: Path) -> None:
    config = config_in(tmp_path, groups_per_step=1, sampling={"group_size": 4, "max_new_tokens": 8})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        lease = (await actor.lease())[0]
        receipts = await actor.submit(sample(lease, 0, 1), sample(lease, 1, 1, reward=0.0), sample(lease, 2, 1, reward=None), sample(lease, 3, 1, logprobs=pack_floats([-0.5, math.nan, -0.5])))
        assert [(receipt.sample_index, receipt.status) for receipt in receipts] == [(n, ACCEPTED) for n in range(4)]
        header, rows = await trainer.take(0)
        assert [(row.usable, row.unusable_reason) for row in header.table] == [(True, ""), (True, ""), (False, "unscored_timeout"), (False, "non_finite_logprob")]
        assert math.isnan(header.table[2].reward)
        assert [row.sample_index for row in rows] == [0, 1]
        await actor.leave()


async def test_a_malformed_trajectory_ends_the_stream_after_the_receipts_before_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        await begun(address, tmp_path)
        actor = Actor(address, config)
        await actor.attend()
        lease = (await actor.lease())[0]
        call = actor.stub.SubmitTrajectories()
        for trajectory in (sample(lease, 0, 1), sample(lease, 1, 1, prompt_ids=pack_ids([9]))):
            await call.write(learner_pb2.SubmitTrajectoriesRequest(run_id="r1", trajectory=trajectory))
        assert (await call.read()).status == ACCEPTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "prompt_ids are not the leased ones" in str(caught.value.details())
        for broken, words in (({"run_id": "r9"}, "r9"), ({"version": 7}, "version 7")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await actor.submit(sample(lease, 1, broken.get("version", 1)), run_id=broken.get("run_id", "r1"))  # type: ignore[arg-type]
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and words in str(caught.value.details())
        stranger = learner_pb2.Lease(group_id="g00000099", prompt_ids=lease.prompt_ids)
        assert (await actor.submit(sample(stranger, 0, 1)))[0].status == UNWANTED
        await actor.leave()


async def test_only_the_step_that_is_due_is_given(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        trainer = await begun(f"127.0.0.1:{gateway.port}", tmp_path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.take(5)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        trainer.incarnation = 99
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.take(0)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_the_run_stops_with_a_message_when_every_group_is_dropped(tmp_path: Path) -> None:
    config = config_in(tmp_path, filter={"zero_signal": True, "max_consecutive_drops": 2})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        taking = asyncio.create_task(trainer.take(0))
        for lease in await actor.lease(max_groups=3):
            await actor.fulfil(lease, rewards=(1.0, 1.0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await taking
        assert caught.value.code() == grpc.StatusCode.ABORTED and "max_consecutive_drops=2" in str(caught.value.details())
        await actor.leave()


async def test_a_run_whose_replicas_are_gone_is_cut_and_ends_naming_them_and_a_slow_replica_is_waited_for(tmp_path: Path) -> None:
    # faults.md 96
    config = config_in(tmp_path, lease={"heartbeat_s": 0.1, "silence_s": 5.0, "lapse_s": 30.0, "alone_minutes": 0.01})  # 0.6 s
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        taking = asyncio.create_task(trainer.take(0))
        await asyncio.sleep(1.2)
        assert not taking.done()  # it attends, and may be drawing
        await actor.leave()
        assert (await taking)[0].save_first
        await trainer.save(0, config.run_dir)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trainer.take(0)
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert re.search(r"no rollout server has attended for \d\.\d minutes, more than lease\.alone_minutes=0\.01", str(caught.value.details()))  # minutes: the save takes its time


async def test_a_run_whose_reward_servers_are_gone_ends_naming_them(tmp_path: Path) -> None:
    # faults.md 96
    config = config_in(tmp_path, filter={"max_consecutive_drops": 2})
    away = trajectory_pb2.Reward(unscored=trajectory_pb2.Unscored(reason=trajectory_pb2.UNSCORED_REASON_UNAVAILABLE))
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        taking = asyncio.create_task(trainer.take(0))
        for lease in await actor.lease(max_groups=3):
            await actor.submit(*(sample_with(lease, index, away) for index in range(2)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await taking
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert "unscored_unavailable: 3; unscored_unavailable means that no reward server answered" in str(caught.value.details())
        await actor.leave()


async def test_the_end_of_the_data_ends_the_run_after_a_short_batch(tmp_path: Path) -> None:
    config = config_in(tmp_path, num_prompts=3, data={"prompts": tmp_path / "prompts.jsonl", "template": "raw", "shuffle": False, "epochs": 1})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        for lease in await actor.lease(max_groups=4):
            await actor.fulfil(lease)
        # faults.md 95: three prompts, two a batch: a whole batch, the rest, then the end; no prompt comes again
        sizes, groups = [], []
        for step in range(3):
            header, _ = await trainer.take(step)
            if header.save_first:  # the end is cut
                await trainer.save(step, config.run_dir)
                header, _ = await trainer.take(step)
            sizes.append((len(header.table), header.end_of_run))
            groups += sorted({row.group_id for row in header.table})
            if not header.end_of_run:
                await trainer.close(step + 1)
        assert sizes == [(4, False), (2, False), (0, True)]
        assert groups == [f"g{seq:08d}" for seq in range(3)]
        await actor.leave()


async def test_the_control_permutes_rewards_inside_groups_only(tmp_path: Path) -> None:
    config = config_in(tmp_path, control="shuffled_rewards", sampling={"group_size": 6, "max_new_tokens": 8})
    rewards = tuple(float(n) for n in range(6))
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        for lease in await actor.lease(max_groups=2):
            await actor.fulfil(lease, rewards=rewards)
        header, _ = await trainer.take(0)
        groups = [tuple(row.reward for row in header.table[start : start + 6]) for start in (0, 6)]
        assert all(sorted(group) == list(rewards) and group != rewards for group in groups) and groups[0] != groups[1]
        assert (await trainer.take(0))[0].table == header.table
        await actor.leave()


def sample_with(lease: learner_pb2.Lease, index: int, reward: trajectory_pb2.Reward) -> trajectory_pb2.Trajectory:
    made = sample(lease, index, 1)
    made.reward.CopyFrom(reward)
    return made
