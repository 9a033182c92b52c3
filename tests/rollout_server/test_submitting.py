"""Samples that are ready together share a message."""

from __future__ import annotations

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server import submitting
from rollout_server.submitting import together


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
