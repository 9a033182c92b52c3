"""Samples that are ready together share a message; refusals are final, absences are not."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server import submitting
from rollout_server.submitting import Finished, MalformedError, Submitting, together


def finished(index: int, *, run_id: str = "r", text_bytes: int = 10) -> Finished:
    trajectory = trajectory_pb2.Trajectory(group_id="g", sample_index=index, text="x" * text_bytes)
    return Finished(run_id=run_id, lease_id=f"l{index}", group_id="g", sample_index=index, trajectory=trajectory.SerializeToString())


def parsed(samples: list[Finished]) -> list[pb.SubmitTrajectoriesRequest]:
    return [pb.SubmitTrajectoriesRequest.FromString(data) for data in together(samples)]


def test_one_sample_alone_names_its_lease() -> None:
    trajectory = trajectory_pb2.Trajectory(group_id="g", sample_index=4, text="x" * 10)
    assert parsed([finished(4)]) == [pb.SubmitTrajectoriesRequest(run_id="r", lease_id="l4", trajectory=trajectory)]


def test_several_samples_share_a_message_in_order_as_protobuf_makes_it() -> None:
    samples = [finished(0), finished(1, text_bytes=200), finished(2, text_bytes=20_000)]  # lengths of one, two and three bytes
    trajectories = [trajectory_pb2.Trajectory.FromString(sample.trajectory) for sample in samples]
    assert list(together(samples)) == [pb.SubmitTrajectoriesRequest(run_id="r", trajectories=trajectories).SerializeToString()]


def test_a_message_ends_once_it_is_large_and_where_the_run_changes() -> None:
    half = submitting.MESSAGE_BYTES // 2
    messages = parsed([finished(0, text_bytes=half), finished(1, text_bytes=half), finished(2), finished(3, run_id="s"), finished(4, run_id="s")])
    assert [[sample.sample_index for sample in message.trajectories] or [message.trajectory.sample_index] for message in messages] == [[0, 1], [2], [3, 4]]
    assert [message.run_id for message in messages] == ["r", "r", "s"]

class _Channel:
    """To a learner whose SubmitTrajectories ends as told, call by call, the last way for ever after."""

    def __init__(self, *ways: grpc.StatusCode | None) -> None:
        self.ways, self.num_calls, self.taken = list(ways), 0, list[pb.SubmitTrajectoriesRequest]()

    def stream_stream(self, method: str, **_: Any) -> Any:
        return self._call

    def _call(self, timeout: float) -> _Call:
        self.num_calls += 1
        return _Call(self.ways.pop(0) if len(self.ways) > 1 else self.ways[0], self.taken)


class _Call:
    def __init__(self, way: grpc.StatusCode | None, taken: list[pb.SubmitTrajectoriesRequest]) -> None:
        self._way, self._taken = way, taken
        self._answers: asyncio.Queue[pb.SubmitTrajectoriesResponse] = asyncio.Queue()

    async def write(self, data: bytes) -> None:
        request = pb.SubmitTrajectoriesRequest.FromString(data)
        if self._way is None:
            self._taken.append(request)
            trajectory = request.trajectory
            self._answers.put_nowait(pb.SubmitTrajectoriesResponse(group_id=trajectory.group_id, sample_index=trajectory.sample_index, status=pb.RECEIPT_STATUS_ACCEPTED))

    def cancel(self) -> None:
        pass

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> pb.SubmitTrajectoriesResponse:
        if self._way is not None:
            await asyncio.sleep(0.01)
            raise grpc.aio.AioRpcError(self._way, grpc.aio.Metadata(), grpc.aio.Metadata(), details="completion_ids must be at least one id")
        return await self._answers.get()


async def test_a_permanent_refusal_ends_it_with_the_learners_words_and_is_not_tried_again() -> None:
    # faults.md 74
    channel = _Channel(grpc.StatusCode.INVALID_ARGUMENT)
    submitting = Submitting(cast(grpc.aio.Channel, channel))
    waiting = asyncio.create_task(submitting.submit(finished(1)))
    with pytest.raises(MalformedError, match="must be at least one id"):
        await asyncio.wait_for(submitting.run(), 60)
    assert channel.num_calls == 1
    waiting.cancel()


async def test_a_passing_failure_is_tried_again_and_one_copy_is_taken() -> None:
    # faults.md 74: UNAVAILABLE twice, then taken
    channel = _Channel(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, None)
    submitting = Submitting(cast(grpc.aio.Channel, channel))
    running = asyncio.create_task(submitting.run())
    receipt = await asyncio.wait_for(submitting.submit(finished(1)), 60)
    assert receipt.status == pb.RECEIPT_STATUS_ACCEPTED and (channel.num_calls, len(channel.taken)) == (3, 1)
    running.cancel()
