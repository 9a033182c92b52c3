from __future__ import annotations

import pytest

from learner.gateway.epochs import Phase
from learner.gateway.handshake import Claim
from learner.gateway.membership import make_groups
from learner.gateway.transports import Transports, out_of_sight, shared_device
from learner.gateway.waves import Waves
from protos.learner.v1alpha1 import learner_pb2 as pb

NCCL, GLOO, IPC = pb.TRANSPORT_NCCL, pb.TRANSPORT_GLOO, pb.TRANSPORT_IPC
A, B, C = ("a", 1), ("b", 1), ("c", 1)


def claim(device: str = "", visible: tuple[str, ...] = (), transports: tuple[int, ...] = (IPC, NCCL, GLOO)) -> Claim:
    return Claim(
        replica_id="a", incarnation=1, run_id="", contract="", base_weights_digest="", tokenizer_digest="", template_digest="", served_dtype="", max_model_len=8,
        transports=transports, device_uuid=device, visible_devices=visible,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("preferred", "adapts", "trainers", "replica", "taken", "used"),
    [
        (NCCL, True, {0: "GPU-a"}, claim("GPU-b"), (), NCCL),  # a device each
        (NCCL, True, {0: "GPU-a"}, claim("GPU-a", ("GPU-a",)), (), IPC),  # one device for both
        (NCCL, True, {0: "GPU-a"}, claim("GPU-a", ("GPU-a",), (NCCL, GLOO)), (), GLOO),  # a replica that knows no IPC
        (NCCL, True, {0: "GPU-a", 1: "GPU-b"}, claim("GPU-b", ("GPU-b",)), (), GLOO),  # it cannot see all of the trainer's devices
        (NCCL, True, {0: "GPU-a"}, claim("GPU-b"), ("GPU-b",), GLOO),  # another replica of this epoch uses its device by NCCL
        (NCCL, True, {0: "GPU-a"}, claim(), (), GLOO),  # a replica on a CPU
        (NCCL, False, {0: "GPU-a"}, claim("GPU-a"), (), pb.TRANSPORT_UNSPECIFIED),  # configured by name: the replica is refused instead
        (IPC, False, {0: "GPU-a"}, claim("GPU-b", ("GPU-b",)), (), pb.TRANSPORT_UNSPECIFIED),
        (GLOO, True, {0: ""}, claim(), (), GLOO),
        (pb.TRANSPORT_GRPC, False, {0: ""}, claim(), (), pb.TRANSPORT_UNSPECIFIED),
    ],
)
def test_a_replica_gets_the_best_transport_that_its_devices_and_the_trainers_allow(
    preferred: pb.Transport, adapts: bool, trainers: dict[int, str], replica: Claim, taken: tuple[str, ...], used: pb.Transport
) -> None:
    assert Transports(preferred=preferred, adapts=adapts).of_replica(replica, trainers, taken)[0] == used


def test_a_replica_on_a_trainers_gpu_is_told_both_roles_the_device_and_the_way_out() -> None:
    # faults.md 25
    why = shared_device({"GPU-a"}, {0: "GPU-z", 1: "GPU-a"})
    assert "trainer rank 1" in why and "GPU-a" in why and "push.transport to ipc" in why
    assert shared_device({"GPU-b"}, {0: "GPU-a"}) == ""
    assert shared_device(set(), {0: ""}) == ""


def test_a_replica_that_does_not_see_the_trainers_memory_is_told_what_both_see() -> None:
    why = out_of_sight(["GPU-b"], {0: "GPU-a"})
    assert "trainer rank 0 is on GPU-a and this replica sees GPU-b" in why and "nccl, gloo or auto" in why
    assert out_of_sight(["GPU-a", "GPU-b"], {0: "GPU-a"}) == ""


def test_every_transport_has_its_group_and_every_worker_a_rank_and_a_name() -> None:
    groups = make_groups(pb.GroupSpec(group_key="7-1", num_owners=2), [(A, NCCL, 2), (B, IPC, 1), (C, NCCL, 1)])
    assert [(g.transport, g.group_key, g.num_receivers, g.receiver_rank, list(g.receivers)) for g in groups.senders] == [
        (NCCL, "7-1-nccl", 3, 0, ["a worker 0", "a worker 1", "c"]), (IPC, "7-1-ipc", 1, 0, ["b"]),
    ]  # fmt: skip
    assert {member[0]: (spec.transport, spec.receiver_rank) for member, spec in groups.specs.items()} == {"a": (NCCL, 1), "b": (IPC, 1), "c": (NCCL, 3)}


def test_a_rebuilt_group_is_announced_as_the_first_one_was_but_for_its_key() -> None:  # faults.md 26
    first, again = (make_groups(pb.GroupSpec(group_key=key, num_owners=2, collective_timeout_s=60, store_host="h", store_port=7), [(A, GLOO, 2), (B, GLOO, 1)]).specs[A] for key in ("7-1", "7-2"))
    assert (first.group_key, again.group_key) == ("7-1", "7-2")
    again.group_key = first.group_key
    assert first == again


def test_half_of_the_fleet_goes_on_drawing_while_the_other_half_applies() -> None:
    waves = Waves(generating_share=0.5)
    assert waves.begin(4, (A, B, C), num_attending=4)  # two places
    assert [waves.report(4, member, Phase.RECEIVED) for member in (A, B, C)] == [(A,), (B,), ()]
    assert waves.report(4, B, Phase.LOADED) == (C,)
    assert waves.report(4, A, Phase.RECEIVED) == ()  # said twice


def test_a_member_that_fails_or_is_lost_frees_its_place() -> None:
    waves = Waves(generating_share=0.9)
    assert waves.begin(4, (A, B, C), num_attending=3)  # 0.3 of a place is still one
    assert (waves.report(4, A, Phase.RECEIVED), waves.report(4, B, Phase.RECEIVED), waves.report(4, C, Phase.RECEIVED)) == ((A,), (), ())
    assert waves.report(4, A, Phase.FAILED) == (B,)
    assert waves.lost(C) == ()
    assert waves.lost(B) == ()


def test_all_at_once_holds_nobody_and_an_older_epoch_is_forgotten() -> None:
    assert not Waves(generating_share=0.0).begin(4, (A, B), num_attending=2)
    waves = Waves(generating_share=0.5)
    waves.begin(4, (A, B), num_attending=2)
    waves.report(4, A, Phase.RECEIVED)
    waves.begin(5, (A, B), num_attending=2)
    assert waves.report(4, A, Phase.LOADED) == ()
    assert waves.report(5, B, Phase.RECEIVED) == (B,)
