"""NCCL demands one global order of everything a communicator's members do, gloo forgives what it does not: every process's recorded calls
(the whole, its splits, collectives) are replayed as NCCL would carry them out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learner.weights.announce import manifest_of
from learner.weights.placement import Split, held
from learner.weights.plan import TensorSpec, TransferPlan, make_plan
from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import learner_pb2
from protos.weights import backends
from protos.weights.receiver import Receiver
from protos.weights.staging import digest

Call = tuple[str, tuple[int, ...], int]  # what, ranks of the whole that must do it together, which (a split: its root; a broadcast: its number)
RANKS, RECEIVERS, ROOTS = 3, 2, 2


@dataclass
class Recorder:
    """What everybody did, by rank in the whole, and the bytes that pass."""

    calls: dict[int, list[Call]] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    overlapped: bool = False
    bytes: dict[tuple[tuple[int, ...], int], torch.Tensor] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, rank: int, call: Call) -> None:
        with self.changed:
            self.calls.setdefault(rank, []).append(call)


@dataclass
class Part:
    """Stands where a split communicator does."""

    rank: int
    members: tuple[int, ...]
    number: int = 0


class RecordedWire:
    """Stands where NcclWire does."""

    recorder = Recorder()

    def __init__(self, host: str, port: int, device: torch.device) -> None:
        pass

    def whole(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        self.recorder.note(rank, ("whole", tuple(range(size)), 0))
        return object()

    def part(self, whole: Any, store: dist.Store, rank: int, members: Sequence[int], timeout: timedelta) -> Part | None:
        everybody = tuple(range(ROOTS + RECEIVERS))
        self.recorder.note(rank, ("split", everybody, members[0]))
        return Part(rank, tuple(members)) if rank in members else None


def recorded_broadcast(part: Part, tensor: torch.Tensor, timeout_s: float, abandoned: threading.Event) -> None:
    recorder, key = RecordedWire.recorder, (part.members, part.number)
    recorder.note(part.rank, ("broadcast", part.members, part.number))
    part.number += 1
    with recorder.changed:
        recorder.running[part.rank] = recorder.running.get(part.rank, 0) + 1
        recorder.overlapped |= recorder.running[part.rank] > 1
        if part.rank == part.members[0]:
            recorder.bytes[key] = tensor.clone()
            recorder.changed.notify_all()
        assert recorder.changed.wait_for(lambda: key in recorder.bytes, timeout_s)
        tensor.copy_(recorder.bytes[key])
        recorder.running[part.rank] -= 1


def replay(calls: dict[int, list[Call]]) -> list[Call]:
    """The order in which NCCL would carry the calls out: each when it is the next of all its members. Raises AssertionError where none is."""
    left = {rank: deque(done) for rank, done in calls.items()}
    order: list[Call] = []
    while any(left.values()):
        heads = {rank: queue[0] for rank, queue in left.items() if queue}
        ready = next((call for call in heads.values() if all(heads.get(member) == call for member in call[1])), None)
        assert ready is not None, f"a deadlock under NCCL: {heads}"
        order.append(ready)
        for member in ready[1]:
            left[member].popleft()
    return order


def a_plan() -> TransferPlan:
    shapes = [(9, 4), (5,), (16, 2), (1,), (3, 3)]
    tensors = [TensorSpec(name=f"t{i}", shape=shape, dtype="bfloat16", itemsize=2) for i, shape in enumerate(shapes)]
    return make_plan(tensors, [[held(shape, (RANKS,), (rank,), [Split(dim=0)]) for rank in range(RANKS)] for shape in shapes], bucket_bytes=16, max_roots=ROOTS)


def spec(store: dist.TCPStore, receiver: int = 0) -> learner_pb2.GroupSpec:
    return learner_pb2.GroupSpec(
        group_key="k", store_host="127.0.0.1", store_port=store.port, num_owners=RANKS, num_receivers=RECEIVERS, receiver_rank=receiver, collective_timeout_s=20.0,
        transport=learner_pb2.TRANSPORT_GLOO,
    )  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(RecordedWire, "recorder", Recorder())
    monkeypatch.setitem(backends.WIRES, "gloo", RecordedWire)
    monkeypatch.setattr(backends, "broadcast", recorded_broadcast)
    monkeypatch.setattr(backends, "abort", lambda _: None)
    return RecordedWire.recorder


def pushed(folder: Path, num_versions: int) -> TransferPlan:
    """So many versions from three trainer ranks, two of them roots, to two receivers."""
    plan = a_plan()
    assert len({bucket.root for bucket in plan.buckets}) == ROOTS  # rank 2's file is sent by another root
    for owner in range(RANKS):
        (folder / f"rank-{owner}.bin").write_bytes(bytes([owner + 1]) * plan.file_bytes(owner))
    pieces: list[list[int]] = [[] for _ in range(RANKS)]
    for piece in plan.slices:
        pieces[piece.owner].append(digest(torch.full((piece.num_bytes,), piece.owner + 1, dtype=torch.uint8).numpy()))
    manifest = manifest_of(plan, policy_step=1, digests=pieces)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def sends(rank: int) -> None:
        sender = Sender(rank, torch.device("cpu"), threading.Event())
        snapshot = Snapshot(folder=folder, policy_step=1, rank=rank, num_bytes=0, total_bytes=0, seconds=0.0, plan=plan)
        for version in range(1, num_versions + 1):
            sender.send([spec(store)], version, OpenSnapshot(snapshot), deadline_s=20.0)

    def receives(number: int) -> None:
        receiver = Receiver()
        for _ in range(num_versions):
            receiver.receive(spec(store, number), manifest, timeout_s=20.0)

    with ThreadPoolExecutor(RANKS + RECEIVERS) as pool:
        jobs: list[tuple[Callable[[int], None], int]] = [*((sends, rank) for rank in range(RANKS)), *((receives, number) for number in range(1, RECEIVERS + 1))]
        for future in [pool.submit(job, number) for job, number in jobs]:
            future.result(30)
    return plan


def test_what_every_process_does_has_the_plan_s_one_order(tmp_path: Path, recorded: Recorder) -> None:
    plan = pushed(tmp_path, num_versions=2)
    everybody = tuple(range(ROOTS + RECEIVERS))
    # Two versions of one membership: one whole, one split a root, then bucket after bucket, a second time without either.
    expected: list[Call] = [("whole", everybody, 0), ("split", everybody, 0), ("split", everybody, 1)]
    numbers = [0, 0]
    for bucket in [*plan.buckets, *plan.buckets]:
        expected.append(("broadcast", (bucket.root, 2, 3), numbers[bucket.root]))
        numbers[bucket.root] += 1
    assert sorted(recorded.calls) == list(everybody)  # rank 2 sends nothing and belongs to no communicator
    assert sorted(replay(recorded.calls)) == sorted(expected)
    for receiver in (2, 3):
        assert recorded.calls[receiver] == expected
    assert not recorded.overlapped


def test_a_process_that_splits_in_another_order_would_be_a_deadlock_under_nccl(tmp_path: Path, recorded: Recorder) -> None:
    pushed(tmp_path, num_versions=1)
    calls = recorded.calls[1]
    calls[1], calls[2] = calls[2], calls[1]
    with pytest.raises(AssertionError, match="a deadlock under NCCL"):
        replay(recorded.calls)
