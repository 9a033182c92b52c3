"""Membership over a real stream: who is let in, who replaces whom, and what silence costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from learner.config import LearnerConfig
from protos.learner.v1alpha1 import learner_pb2
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, eventually, failure, running, sample
from tests.learner.gateway.scenes import begun


@pytest.mark.parametrize("claims", [{"run_id": "r2"}, {"base_weights_digest": "0"}, {"tokenizer_digest": "0"}, {"template_digest": "0"}, {"contract": "v0"}, {"served_dtype": "bfloat16"}, {"max_model_len": 1}])
async def test_a_stranger_gets_failed_precondition_with_both_values(tmp_path: Path, claims: dict[str, Any]) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        actor = Actor(f"127.0.0.1:{gateway.port}", config, **claims)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await actor.attend()
        await actor.leave()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert str(next(iter(claims.values()))) in str(caught.value.details())


async def refusal(address: str, config: LearnerConfig) -> grpc.aio.AioRpcError:
    """How a replica of 9 tokens is sent away: at once, or as soon as the prompts are known.

    A client that writes into a stream just ended reads INTERNAL of its own side; like a real replica it comes back to hear why.
    """
    for _ in range(5):
        actor = Actor(address, config, max_model_len=9)
        try:
            await actor.attend()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        await eventually(actor.call.done)
        refused = await failure(actor.call)
        await actor.leave()
        if refused.code() != grpc.StatusCode.INTERNAL:
            break
    return refused


async def test_a_replica_too_short_for_the_longest_prompt_is_refused_once_prompts_are_rendered(tmp_path: Path) -> None:
    config = config_in(tmp_path)  # prompts of 2 tokens and 8 to draw: 10
    async with running(config) as gateway:
        refused = await refusal(f"127.0.0.1:{gateway.port}", config)
    assert refused.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "max_model_len is 9" in str(refused.details()) and "10" in str(refused.details())


async def test_a_newer_incarnation_replaces_the_older_stream_and_an_older_one_is_told_to_leave(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        old, new, late = Actor(address, config, incarnation=5), Actor(address, config, incarnation=6), Actor(address, config, incarnation=4)
        await old.attend()
        await new.attend()
        await eventually(old.call.done)
        assert await old.call.code() == grpc.StatusCode.ALREADY_EXISTS
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.attend()
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        assert not new.call.done()
        for actor in (old, new, late):
            await actor.leave()


async def test_a_life_with_a_lower_number_is_admitted_once_the_other_has_left_since_clocks_are_set_back(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        before = Actor(address, config, incarnation=9)
        await before.attend()
        await before.leave()
        await eventually(lambda: not gateway._attendance.attending())
        after = Actor(address, config, incarnation=5)
        assert (await after.attend()).run_id == "r1"
        await after.leave()



async def test_a_replica_that_does_not_attend_gets_no_lease(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        actor = Actor(f"127.0.0.1:{gateway.port}", config)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await actor.lease(wait_s=0.1)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await actor.leave()


async def test_a_replica_leases_only_after_it_loaded_a_version(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        await trainer.register()
        version = (await trainer.close(0)).version
        welcome = await actor.attend(loaded_version=0, beating=False)
        assert welcome.newest_version == version
        assert await actor.lease(wait_s=0.3) == []
        waiting = asyncio.create_task(actor.lease(wait_s=5.0))
        await actor.beat(version)
        lease = (await waiting)[0]
        assert (lease.seq, lease.least_version, lease.attempt, lease.group_size) == (0, version, 1, 2)
        await actor.leave()


async def test_silence_frees_the_leases_at_once(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, silent, other = Trainer(address, tmp_path / "shm"), Actor(address, config, "a"), Actor(address, config, "b")
        await trainer.register()
        await trainer.close(0)
        await silent.attend(beating=False)
        await other.attend()
        first = (await silent.lease())[0]
        again = await other.lease(max_groups=4)  # P = 2, S = 1: four may be open, three are new
        assert [lease.seq for lease in again] == [1, 2, 3]
        lease = (await other.lease(wait_s=5.0))[0]  # silence_s is 1
        assert (lease.seq, lease.attempt, lease.group_id) == (first.seq, 2, first.group_id)
        assert await silent.call.code() == grpc.StatusCode.UNAVAILABLE
        status = await other.stub.GetStatus(learner_pb2.GetStatusRequest())
        replica = {r.replica_id: r for r in status.replicas}
        assert not replica["a"].attending and "silent" in replica["a"].detail
        assert (replica["b"].attending, replica["b"].num_leases) == (True, 4)
        for actor in (silent, other):
            await actor.leave()


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_a_stream_that_ends_frees_the_leases_at_once(tmp_path: Path, says_goodbye: bool) -> None:
    config = config_in(tmp_path, lease={"heartbeat_s": 0.1, "silence_s": 20.0, "lapse_s": 30.0})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, first, second = Trainer(address, tmp_path / "shm"), Actor(address, config, "a"), Actor(address, config, "b")
        await trainer.register()
        await trainer.close(0)
        await first.attend()
        await second.attend()
        held = await first.lease(max_groups=4)
        assert len(held) == 4 and await second.lease(wait_s=0.1) == []
        if says_goodbye:
            await first.write(learner_pb2.AttendRequest(goodbye=learner_pb2.Goodbye()))
        else:
            first.call.cancel()
        assert [lease.seq for lease in await second.lease(max_groups=4, wait_s=5.0)] == [0, 1, 2, 3]
        for actor in (first, second):
            await actor.leave()


async def test_after_a_resume_nothing_is_lent_to_a_replica_whose_first_transfer_failed(tmp_path: Path) -> None:
    # faults.md 120: the run goes on as version 3, and that is what the first lease asks for
    config = config_in(tmp_path)
    async with begun(config, tmp_path) as at:
        await at.step(0, will_save=True)
        await at.trainer.save(1, config.run_dir)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm", incarnation=200), Actor(address, config, incarnation=2)
        assert (await trainer.register()).policy_step == 1
        version = (await trainer.close(1)).version
        welcome = await actor.attend(loaded_version=0, beating=False)
        assert welcome.newest_version == version == 3
        await actor.report(0, version, learner_pb2.UPDATE_PHASE_FAILED, "status error in the body")
        assert await actor.lease(wait_s=0.3) == []
        await actor.report(0, version, learner_pb2.UPDATE_PHASE_LOADED)
        lease = (await actor.lease(wait_s=5.0))[0]
        assert lease.least_version == version
        with pytest.raises(grpc.aio.AioRpcError, match="the lease asked for 3 or newer"):
            await actor.submit(sample(lease, 0, 2))
        await actor.leave()
