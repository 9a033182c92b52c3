"""NCCL demands one global order of collectives, gloo forgives what it does not: every rank's recorded calls are replayed against the one order."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.weights import sender
from learner.weights.announce import manifest_of
from learner.weights.placement import Split, held
from learner.weights.plan import TensorSpec, TransferPlan, make_plan
from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import learner_pb2
from protos.weights import receiver
from protos.weights.group import GroupAddress
from protos.weights.receiver import Receiver
from protos.weights.staging import digest


@dataclass
class Recorder:
    """What one process started, and whether two of its collectives were ever under way together."""

    calls: list[tuple[str, str]] = field(default_factory=list)  # group key, what
    num_running: int = 0
    overlapped: bool = False


class RecordedGroup:
    """Stands where TransferGroup does; a broadcast brings what `bytes_of` says."""

    recorder = Recorder()
    incoming: Any = staticmethod(lambda key, number, tensor: None)

    def __init__(self, key: str) -> None:
        self.key, self.number = key, 0

    @classmethod
    def connect(cls, address: GroupAddress, **_: Any) -> RecordedGroup:
        return cls(address.key)

    def start(self, tensor: torch.Tensor, *, root: int, what: str, timeout_s: float) -> RecordedGroup:
        recorder = type(self).recorder
        recorder.overlapped |= recorder.num_running > 0
        recorder.num_running += 1
        recorder.calls.append((self.key, f"{self.number}"))
        self.incoming(self.key, self.number, tensor)
        self.number += 1
        return self

    def wait(self, cancelled: threading.Event | None = None) -> None:
        type(self).recorder.num_running -= 1

    def close(self) -> None:
        pass


def a_plan(num_ranks: int) -> TransferPlan:
    shapes = [(9, 4), (5,), (16, 2), (1,), (3, 3)]
    tensors = [TensorSpec(name=f"t{i}", shape=shape, dtype="bfloat16", itemsize=2) for i, shape in enumerate(shapes)]
    return make_plan(tensors, [[held(shape, (num_ranks,), (rank,), [Split(dim=0)]) for rank in range(num_ranks)] for shape in shapes], bucket_bytes=16, max_roots=2)


def specs() -> list[learner_pb2.GroupSpec]:
    """Two transports in one epoch, as replicas on a CPU and elsewhere would have it."""
    common: dict[str, Any] = {"store_host": "h", "store_port": 1, "num_owners": 3, "collective_timeout_s": 5.0, "transport": learner_pb2.TRANSPORT_GLOO}
    return [learner_pb2.GroupSpec(group_key=key, num_receivers=receivers, **common) for key, receivers in (("near", 2), ("far", 1))]


def test_every_rank_issues_its_collectives_in_the_plan_s_order_and_never_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan(3)
    assert len({bucket.root for bucket in plan.buckets}) == 2  # rank 2's file is sent by another root
    files = {owner: bytes([owner + 1]) * plan.file_bytes(owner) for owner in range(3)}
    for owner, data in files.items():
        (tmp_path / f"rank-{owner}.bin").write_bytes(data)
    for module in (sender, receiver):
        monkeypatch.setattr(module, "TransferGroup", RecordedGroup)
    # The one order: bucket by bucket of the plan, for each transport in turn. A group's name and the bucket's number in it.
    order: list[tuple[str, str]] = []
    numbers: dict[str, int] = {}
    for bucket in plan.buckets:
        for spec in specs():
            key = f"{spec.group_key}/owner-{bucket.root}"
            order.append((key, str(numbers.setdefault(key, 0))))
            numbers[key] += 1
    for rank in range(3):
        monkeypatch.setattr(RecordedGroup, "recorder", Recorder())
        snapshot = Snapshot(folder=tmp_path, policy_step=1, rank=rank, num_bytes=0, total_bytes=0, seconds=0.0, plan=plan)
        Sender(rank, torch.device("cpu"), threading.Event()).send(specs(), 1, OpenSnapshot(snapshot), deadline_s=5.0)
        assert RecordedGroup.recorder.calls == [call for call in order if call[0].endswith(f"/owner-{rank}")]
        assert not RecordedGroup.recorder.overlapped and RecordedGroup.recorder.num_running == 0
    pieces: list[list[int]] = [[] for _ in range(3)]
    for piece in plan.slices:
        pieces[piece.owner].append(digest(torch.full((piece.num_bytes,), piece.owner + 1, dtype=torch.uint8).numpy()))
    manifest = manifest_of(plan, policy_step=1, digests=pieces)
    by_root = {root: [bucket for bucket in plan.buckets if bucket.root == root] for root in {bucket.root for bucket in plan.buckets}}

    def arrives(key: str, number: int, tensor: torch.Tensor) -> None:
        tensor.fill_(by_root[int(key.rpartition("-")[2])][number].owner + 1)

    monkeypatch.setattr(RecordedGroup, "incoming", staticmethod(arrives))
    for spec in specs():
        monkeypatch.setattr(RecordedGroup, "recorder", Recorder())
        spec.receiver_rank = 1
        Receiver().receive(spec, manifest, timeout_s=5.0)
        assert RecordedGroup.recorder.calls == [call for call in order if call[0].startswith(f"{spec.group_key}/")]
        assert not RecordedGroup.recorder.overlapped
