"""What a plain gRPC client may send by mistake: each has its status and its words, and the gateway goes on serving."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import rpc
from protos.arrays import pack_floats, pack_ids, pack_mask
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, running, sample

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[Actor]:
    """Attends a run that has published version 1; leaves a gateway behind that still answers."""
    config = config_in(tmp_path)
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = Trainer(address, tmp_path / "shm"), Actor(address, config)
        await trainer.register()
        await trainer.close(0)
        await actor.attend()
        yield actor
        status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=30)
        assert status.num_leased == status.num_trained + sum(status.num_dropped.values()) + status.num_open
        await actor.leave()
        await trainer.channel.close()


def span(version: int, start: int, end: int) -> pb.VersionSpan:
    return pb.VersionSpan(version=version, start=start, end=end)


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": pack_floats([-0.5] * 2)}, "logprobs: 2 values for 3 completion tokens"),
    ({"loss_mask": pack_mask([1, 1])}, "loss_mask: 2 values for 3 completion tokens"),
    ({"loss_mask": pack_mask([1, 2, 1])}, "loss_mask must be zeros and ones, got 2"),
    ({"completion_ids": pack_ids([])}, "at least one id"),
    ({"completion_ids": pack_ids([5, 32, 5])}, r"in [0, 32)"),
    ({"completion_ids": pb.PackedArray(dtype=pb.PACKED_DTYPE_INT32, data=b"12345")}, "not a multiple of 4"),
    ({"completion_ids": pb.PackedArray(data=b"1234")}, "dtype is 0"),
    ({"prompt_ids": pack_ids([1, 2, 3])}, "prompts travel unchanged"),
    ({"prompt_ids": pack_ids([])}, "prompt_ids must be int32 and not empty"),
    ({"spans": []}, "spans end at 0"),
    ({"spans": [span(1, 0, 1), span(1, 2, 3)]}, "spans must follow each other"),
    ({"spans": [span(1, 0, 2), span(1, 1, 3)]}, "spans must follow each other"),
    ({"spans": [span(1, 0, 4)]}, "spans end at 4"),
    ({"spans": [span(9, 0, 3)]}, "a span names version 9"),
    ({"finish_reason": pb.FINISH_REASON_UNSPECIFIED}, "finish_reason is not set"),
    ({"sample_index": 2}, "sample_index=2 is outside the group of 2"),
]


@pytest.mark.parametrize(("changes", "words"), MALFORMED, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
async def test_a_malformed_trajectory_is_refused_with_its_rule_and_costs_nothing(actor: Actor, changes: dict[str, Any], words: str) -> None:
    (lease,) = await actor.lease()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await actor.submit(sample(lease, 0, 1, **changes))
    assert caught.value.code() == INVALID and words in str(caught.value.details())
    assert await actor.fulfil(lease) == [learner_pb2.RECEIPT_STATUS_ACCEPTED] * 2


@pytest.mark.parametrize(("num_tokens", "dropped"), [(8, {}), (9, {"unusable": 1})])
async def test_a_completion_longer_than_was_leased_is_unusable(actor: Actor, num_tokens: int, dropped: dict[str, int]) -> None:
    (lease,) = await actor.lease()  # max_new_tokens is 8, min_usable 2
    receipts = await actor.submit(sample(lease, 1, 1), sample(lease, 0, 1, num_tokens=num_tokens))
    assert [receipt.status for receipt in receipts] == [learner_pb2.RECEIPT_STATUS_ACCEPTED] * 2
    status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=30)
    assert status.num_dropped == dropped


async def test_a_trajectory_of_another_run_is_refused(actor: Actor) -> None:
    (lease,) = await actor.lease()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await actor.submit(sample(lease, 0, 1), run_id="r2")
    assert caught.value.code() == INVALID and "belongs to run r2, this is r1" in str(caught.value.details())


@pytest.mark.parametrize("group_id", ["", "g00000077", "g-1", "x" * 100_000])
async def test_a_group_that_nobody_leased_is_unwanted(actor: Actor, group_id: str) -> None:
    (lease,) = await actor.lease()
    (receipt,) = await actor.submit(sample(lease, 0, 1, group_id=group_id))
    assert receipt.status == learner_pb2.RECEIPT_STATUS_UNWANTED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_log_prob_that_is_no_number_makes_its_sample_unusable_and_nothing_else(actor: Actor, value: float) -> None:
    (lease,) = await actor.lease()
    receipts = await actor.submit(sample(lease, 1, 1), sample(lease, 0, 1, logprobs=pack_floats([-0.5, value, -0.5])))
    assert [receipt.status for receipt in receipts] == [learner_pb2.RECEIPT_STATUS_ACCEPTED] * 2
    status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=30)
    assert status.num_dropped == {"unusable": 1}  # min_usable is 2


async def test_leasing_without_attending_is_a_failed_precondition(actor: Actor) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await actor.stub.LeaseGroups(learner_pb2.LeaseGroupsRequest(replica_id="stranger", incarnation=1, max_groups=1, wait_s=1), timeout=30)
    assert caught.value.code() == PRECONDITION and "attend first" in str(caught.value.details())


@pytest.mark.parametrize("wait_s", [math.nan, -1.0])
async def test_a_wait_that_is_no_time_is_refused(actor: Actor, wait_s: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await actor.lease(wait_s=wait_s)
    assert caught.value.code() == INVALID and f"wait_s={wait_s}" in str(caught.value.details())


async def test_a_stream_that_begins_with_no_hello_is_a_failed_precondition(actor: Actor) -> None:
    call = actor.stub.Attend()
    await call.write(learner_pb2.AttendRequest(heartbeat=learner_pb2.Heartbeat()))
    assert await call.code() == PRECONDITION and "no Hello" in str(await call.details())


async def test_a_stream_that_says_nothing_is_ended(actor: Actor) -> None:
    call = actor.stub.Attend()
    assert await asyncio.wait_for(call.code(), 5) == grpc.StatusCode.UNAVAILABLE  # silence_s is 1
    assert "said nothing for 1.0 s" in str(await call.details())


async def test_weights_are_not_found_before_anything_is_published(tmp_path: Path) -> None:
    async with running(config_in(tmp_path)) as gateway, rpc.channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [part async for part in stub.FetchWeights(learner_pb2.FetchWeightsRequest(), timeout=30)]
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND and "no version is published yet" in str(caught.value.details())
        assert (await stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=30)).run_id == "r1"
