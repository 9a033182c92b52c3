"""Samples that are ready together share a message; refusals are final, absences are not."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server import submitting
from rollout_server.submitting import MalformedError, Submitting, together


def request(index: int, *, run_id: str = "r", text_bytes: int = 10) -> pb.SubmitTrajectoriesRequest:
    return pb.SubmitTrajectoriesRequest(run_id=run_id, lease_id=f"l{index}", trajectory=trajectory_pb2.Trajectory(group_id="g", sample_index=index, text="x" * text_bytes))


def test_one_sample_alone_keeps_its_message() -> None:
    one = request(0)
    assert list(together([one])) == [one]


def test_several_samples_share_a_message_in_order() -> None:
    (message,) = together([request(0), request(1), request(2)])
    assert [sample.sample_index for sample in message.trajectories] == [0, 1, 2]
    assert message.run_id == "r" and not message.HasField("trajectory")


def test_a_message_ends_once_it_is_large_and_where_the_run_changes() -> None:
    half = submitting.MESSAGE_BYTES // 2
    messages = list(together([request(0, text_bytes=half), request(1, text_bytes=half), request(2), request(3, run_id="s"), request(4, run_id="s")]))
    assert [[sample.sample_index for sample in message.trajectories] or [message.trajectory.sample_index] for message in messages] == [[0, 1], [2], [3, 4]]
    assert [message.run_id for message in messages] == ["r", "r", "s"]

class _Stub:
    """A learner's end of SubmitTrajectories: each call ends as told, the last way for ever after."""

    def __init__(self, *ways: grpc.StatusCode | None) -> None:
        self.ways, self.num_calls, self.taken = list(ways), 0, list[pb.SubmitTrajectoriesRequest]()

    def SubmitTrajectories(self, timeout: float) -> _Call:
        self.num_calls += 1
        return _Call(self.ways.pop(0) if len(self.ways) > 1 else self.ways[0], self.taken)


class _Call:
    def __init__(self, way: grpc.StatusCode | None, taken: list[pb.SubmitTrajectoriesRequest]) -> None:
        self._way, self._taken = way, taken
        self._answers: asyncio.Queue[pb.SubmitTrajectoriesResponse] = asyncio.Queue()

    async def write(self, request: pb.SubmitTrajectoriesRequest) -> None:
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


def one_sample() -> pb.SubmitTrajectoriesRequest:
    return pb.SubmitTrajectoriesRequest(run_id="r", trajectory=trajectory_pb2.Trajectory(group_id="g00000007", sample_index=1))


async def test_a_permanent_refusal_ends_it_with_the_learners_words_and_is_not_tried_again() -> None:
    # faults.md 74
    stub = _Stub(grpc.StatusCode.INVALID_ARGUMENT)
    submitting = Submitting(stub)
    waiting = asyncio.create_task(submitting.submit(one_sample()))
    with pytest.raises(MalformedError, match="must be at least one id"):
        await asyncio.wait_for(submitting.run(), 10)
    assert stub.num_calls == 1
    waiting.cancel()


async def test_a_passing_failure_is_tried_again_and_one_copy_is_taken() -> None:
    # faults.md 74: UNAVAILABLE twice, then taken
    stub = _Stub(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, None)
    submitting = Submitting(stub)
    running = asyncio.create_task(submitting.run())
    receipt = await asyncio.wait_for(submitting.submit(one_sample()), 10)
    assert receipt.status == pb.RECEIPT_STATUS_ACCEPTED and (stub.num_calls, len(stub.taken)) == (3, 1)
    running.cancel()
