"""Samples that are ready together share a message."""

from __future__ import annotations

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server import submitting
from rollout_server.submitting import Finished, together


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
