"""Weight-update epochs with fake replicas: membership is settled, a silent or dead one costs one epoch, never the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protos.learner.v1alpha1 import learner_pb2 as pb
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, eventually, running


@asynccontextmanager
async def fleet(folder: Path, *names: str, world_size: int = 1) -> AsyncIterator[tuple[Trainer, list[Actor]]]:
    """A trainer that has published version 1, and replicas that have loaded nothing."""
    config = config_in(folder)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actors = Trainer(address, folder / "shm", world_size=world_size), [Actor(address, config, name) for name in names]
        await trainer.register()
        await trainer.close(0)
        for actor in actors:
            await actor.attend(loaded_version=0)
        yield trainer, actors
        for actor in actors:
            await actor.leave()


async def prepared(actor: Actor, phase: pb.UpdatePhase = pb.UPDATE_PHASE_READY) -> pb.PrepareUpdate:
    """Answers the next PrepareUpdate."""
    order = await actor.order("prepare_update")
    await actor.report(order.epoch, order.version, phase)
    return order


async def received(actor: Actor, phase: pb.UpdatePhase = pb.UPDATE_PHASE_RECEIVED, detail: str = "") -> pb.BeginTransfer:
    """Reports how the next BeginTransfer went."""
    order = await actor.order("begin_transfer")
    await actor.report(order.epoch, order.manifest.version, phase, detail)
    return order


async def test_ready_replicas_are_members_in_order_and_get_the_manifest(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b", "a", world_size=2) as (trainer, (b, a)):
        begins = [asyncio.create_task(trainer.begin(1, rank=rank)) for rank in range(2)]
        await asyncio.gather(prepared(a), prepared(b))
        first, second = await asyncio.gather(*begins)
        assert list(first.members) == ["a", "b"] and first == second
        assert (first.group.num_owners, first.group.num_receivers, first.group.receiver_rank, first.group.store_port) == (2, 2, 0, 1)
        ends = [asyncio.create_task(trainer.end(first.epoch, rank=rank)) for rank in range(2)]
        orders = await asyncio.gather(received(a), received(b))
        assert [order.group.receiver_rank for order in orders] == [1, 2]
        assert {order.group.group_key for order in orders} == {first.group.group_key} and orders[0].manifest.version == 1
        outcome, _ = await asyncio.gather(*ends)
        assert [(o.replica_id, o.phase) for o in outcome.outcomes] == [("a", pb.UPDATE_PHASE_RECEIVED), ("b", pb.UPDATE_PHASE_RECEIVED)]
        assert not outcome.retry


async def test_a_silent_replica_is_left_out_and_the_other_is_updated(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a", "b") as (trainer, (a, b)):
        begin = asyncio.create_task(trainer.begin(1))
        await prepared(a)
        settled = await begin  # prepare_s is 0.4
        assert list(settled.members) == ["a"]
        assert (await b.order("abort_update")).epoch == settled.epoch
        end = asyncio.create_task(trainer.end(settled.epoch))
        await received(a)
        assert [(o.replica_id, o.phase) for o in (await end).outcomes] == [("a", pb.UPDATE_PHASE_RECEIVED)]


async def test_a_member_that_says_nothing_is_aborted_at_the_deadline_and_the_rest_are_tried_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a", "b") as (trainer, (a, b)):
        begin = asyncio.create_task(trainer.begin(1))
        await asyncio.gather(prepared(a), prepared(b))
        settled = await begin
        end = asyncio.create_task(trainer.end(settled.epoch, ok=False))
        await received(a, pb.UPDATE_PHASE_FAILED, "the collective timed out")
        outcome = await end  # deadline_s is 4
        assert [(o.replica_id, o.phase, o.detail) for o in outcome.outcomes] == [("a", pb.UPDATE_PHASE_FAILED, "the collective timed out"), ("b", pb.UPDATE_PHASE_UNSPECIFIED, "unheard")]
        assert outcome.retry
        assert (await b.order("abort_update")).epoch == settled.epoch
        retry = asyncio.create_task(trainer.begin(1, attempt=1))
        await prepared(a)
        settled_again = await retry
        assert list(settled_again.members) == ["a"] and settled_again.group.group_key != settled.group.group_key
        assert b.orders.empty(), "the one that is to blame is not asked again for this version"


async def test_a_member_that_dies_ends_the_epoch_at_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a", "b") as (trainer, (a, b)):
        begin = asyncio.create_task(trainer.begin(1))
        await asyncio.gather(prepared(a), prepared(b))
        settled = await begin
        await b.leave()
        end = asyncio.create_task(trainer.end(settled.epoch, ok=False))
        await received(a, pb.UPDATE_PHASE_FAILED, "connection closed")
        outcome = await asyncio.wait_for(end, 20)
        assert outcome.retry and [o.phase for o in outcome.outcomes] == [pb.UPDATE_PHASE_FAILED, pb.UPDATE_PHASE_UNSPECIFIED]


async def push(trainer: Trainer, version: int, actors: list[Actor], phase: pb.UpdatePhase = pb.UPDATE_PHASE_LOADED) -> str:
    """One whole epoch; its group key."""
    begin = asyncio.create_task(trainer.begin(version))
    await asyncio.gather(*(prepared(actor) for actor in actors))
    settled = await begin
    end = asyncio.create_task(trainer.end(settled.epoch))
    await asyncio.gather(*(received(actor, phase, "bad digest in wte") for actor in actors))
    await end
    return str(settled.group.group_key)


async def next_version(trainer: Trainer) -> int:
    """Publishes once more: a new incarnation is not needed, the trainer starts again from the same policy."""
    trainer.incarnation += 1
    await trainer.register()
    return (await trainer.close(0)).version


async def test_communicators_are_kept_while_trainer_and_membership_stay_and_the_last_epoch_went_well(tmp_path: Path) -> None:
    config = config_in(tmp_path, groups_per_step=1)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actors = Trainer(address, tmp_path / "shm"), [Actor(address, config, name) for name in ("a", "b", "c")]
        await trainer.register()
        await trainer.close(0)
        a, b, c = actors
        for actor in (a, b):
            await actor.attend(loaded_version=0, beating=False)
        keys = [await push(trainer, 1, [a, b])]
        for step, (members, phase) in enumerate([([a, b], pb.UPDATE_PHASE_LOADED), ([a, b], pb.UPDATE_PHASE_FAILED), ([a, b], pb.UPDATE_PHASE_LOADED), ([a, b, c], pb.UPDATE_PHASE_LOADED)]):
            if c in members:
                await c.attend(loaded_version=0, beating=False)
            lease = (await a.lease())[0]
            await a.fulfil(lease, version=lease.least_version)
            await trainer.take(step)
            keys.append(await push(trainer, (await trainer.close(step + 1)).version, members, phase))
        assert keys[0] == keys[1] == keys[2]  # well, and well: the third epoch begins on the same group, and fails
        assert keys[3] != keys[2]  # a fresh one after the failure
        assert keys[4] not in keys[:4]  # another membership
        for actor in actors:
            await actor.leave()


async def test_a_replica_that_fails_twice_in_a_row_is_left_out_and_status_says_why(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (trainer, (a,)):
        await push(trainer, 1, [a], pb.UPDATE_PHASE_FAILED)
        assert await next_version(trainer) == 2
        await push(trainer, 2, [a], pb.UPDATE_PHASE_FAILED)
        assert await next_version(trainer) == 3
        assert list((await trainer.begin(3)).members) == []
        status = await a.stub.GetStatus(pb.GetStatusRequest())
        assert status.replicas[0].quarantined and "left out of pushes after 2 failures in a row" in status.replicas[0].detail and "bad digest in wte" in status.replicas[0].detail


async def test_a_replica_that_has_the_version_is_not_asked(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (trainer, (a,)):
        await a.beat(1)
        await a.report(0, 1, pb.UPDATE_PHASE_LOADED)  # it fetched
        await asyncio.sleep(0.05)
        assert list((await trainer.begin(1)).members) == []


async def test_ranks_that_skipped_to_a_newer_version_are_not_kept_waiting_for_the_older(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a", world_size=2) as (trainer, (a,)):
        older = asyncio.create_task(trainer.begin(1, attempt=0, rank=0))
        await asyncio.sleep(0.1)
        newer = asyncio.create_task(trainer.begin(1, attempt=1, rank=1))
        assert list((await older).members) == []
        late = await trainer.begin(1, attempt=0, rank=0)
        assert list(late.members) == [] and not newer.done()
        joined = asyncio.create_task(trainer.begin(1, attempt=1, rank=0))
        await prepared(a)
        assert list((await joined).members) == list((await newer).members) == ["a"]


async def test_the_end_of_an_epoch_that_a_restarted_gateway_does_not_know_asks_for_no_retry(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (trainer, _):
        answer = await trainer.end(12345)
        assert not answer.outcomes and not answer.retry


async def test_every_published_version_is_announced(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (trainer, (a,)):
        assert await next_version(trainer) == 2
        assert (await a.order("published")).version == 2
        await eventually(lambda: not a.call.done())


async def test_a_replica_that_says_it_has_a_version_of_the_future_counts_as_having_none_and_is_pushed_to(tmp_path: Path) -> None:
    async with fleet(tmp_path, "a") as (trainer, (a,)):
        await a.leave()
        a = Actor(a.address, a.config, "a", incarnation=2)
        await a.attend(loaded_version=57)  # version 1 is the newest
        await a.report(0, 58, pb.UPDATE_PHASE_LOADED)
        assert not await a.lease(wait_s=0.3)  # what it would sample from is not known
        replica = (await a.stub.GetStatus(pb.GetStatusRequest())).replicas[0]
        assert replica.loaded_version == 0 and replica.detail == "says that it has loaded version 57, the newest published is 1: counted as none"
        begin = asyncio.create_task(trainer.begin(1))
        await prepared(a)
        assert list((await begin).members) == ["a"]
        await a.leave()


async def test_half_of_the_fleet_is_told_to_commit_and_the_other_half_once_it_has_loaded(tmp_path: Path) -> None:
    push = {"transport": "gloo", "prepare_s": 0.4, "collective_timeout_s": 2.0, "deadline_s": 4.0, "generating_share": 0.5}
    config = config_in(tmp_path, push=push)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, a, b = Trainer(address, tmp_path / "shm"), Actor(address, config, "a"), Actor(address, config, "b")
        await trainer.register()
        await trainer.close(0)
        for actor in (a, b):
            await actor.attend(loaded_version=0)
        settling = asyncio.create_task(trainer.begin(1))
        await asyncio.gather(prepared(a), prepared(b))
        epoch = (await settling).epoch
        ending = asyncio.create_task(trainer.end(epoch))
        assert (await received(a)).hold and (await a.order("commit_update")).epoch == epoch
        assert (await received(b)).hold
        assert not (await ending).retry  # the epoch is over when everybody has the bytes
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(b.order("commit_update"), 0.3)
        await a.report(epoch, 1, pb.UPDATE_PHASE_LOADED)
        assert (await b.order("commit_update")).epoch == epoch
        loads = [json.loads(line) for line in (config.run_dir / "loads.jsonl").read_text().splitlines()]
        assert [(line["replica_id"], line["version"], line["epoch"]) for line in loads] == [("a", 1, epoch)]
        for actor in (a, b):
            await actor.leave()
