from __future__ import annotations

import pytest

from learner.gateway.transports import Transports, shared_device
from protos.learner.v1alpha1 import learner_pb2 as pb


@pytest.mark.parametrize(
    ("preferred", "adapts", "trainers", "replicas", "used"),
    [
        (pb.TRANSPORT_NCCL, True, ["GPU-a"], ["GPU-b"], pb.TRANSPORT_NCCL),  # a device each
        (pb.TRANSPORT_NCCL, True, ["GPU-a"], ["GPU-a"], pb.TRANSPORT_GLOO),  # one device for both
        (pb.TRANSPORT_NCCL, True, ["GPU-a", "GPU-b"], ["GPU-c", "GPU-b"], pb.TRANSPORT_GLOO),
        (pb.TRANSPORT_NCCL, True, [""], [""], pb.TRANSPORT_NCCL),  # no UUID is no shared device
        (pb.TRANSPORT_NCCL, False, ["GPU-a"], ["GPU-a"], pb.TRANSPORT_NCCL),  # configured by name: the replica is refused instead
        (pb.TRANSPORT_GLOO, True, [""], [""], pb.TRANSPORT_GLOO),
    ],
)
def test_auto_leaves_nccl_where_a_replica_shares_a_trainers_gpu(
    preferred: pb.Transport, adapts: bool, trainers: list[str], replicas: list[str], used: pb.Transport
) -> None:
    assert Transports(preferred=preferred, adapts=adapts).of_epoch(trainers, replicas) == used


def test_a_replica_on_a_trainers_gpu_is_told_both_roles_the_device_and_the_way_out() -> None:
    # faults.md 25
    why = shared_device("GPU-a", {0: "GPU-z", 1: "GPU-a"})
    assert "trainer rank 1" in why
    assert "GPU-a" in why
    assert "push.transport to gloo" in why
    assert shared_device("GPU-b", {0: "GPU-a"}) == ""
    assert shared_device("", {0: ""}) == ""
