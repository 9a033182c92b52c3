"""Several roots and a receiver that is slow over every tensor: nobody runs ahead into a deadlock, over real gloo."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from learner.weights.announce import manifest_of
from learner.weights.placement import Split, held
from learner.weights.plan import TensorSpec, make_plan
from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import staging
from protos.weights.receiver import Receiver
from protos.weights.staging import digest

NUM_TENSORS = 20


@pytest.mark.parametrize("world", [2, 4])
def test_twenty_tensors_reach_a_slow_receiver_in_their_order_and_all_ranks_come_back(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # faults.md 20
    tensors = [TensorSpec(name=f"t{i}", shape=(8, 2), dtype="bfloat16", itemsize=2) for i in range(NUM_TENSORS)]
    plan = make_plan(tensors, [[held((8, 2), (world,), (rank,), [Split(dim=0)]) for rank in range(world)] for _ in tensors], bucket_bytes=32)
    for owner in range(world):
        (tmp_path / f"rank-{owner}.bin").write_bytes(bytes([owner + 1]) * plan.file_bytes(owner))
    digests: list[list[int]] = [[] for _ in range(world)]
    for piece in plan.slices:
        digests[piece.owner].append(digest(torch.full((piece.num_bytes,), piece.owner + 1, dtype=torch.uint8).numpy()))
    manifest = manifest_of(plan, policy_step=1, digests=digests)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    spec = learner_pb2.GroupSpec(transport=learner_pb2.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=store.port, group_key="k", num_owners=world, num_receivers=1, receiver_rank=1, collective_timeout_s=30.0)
    placed: list[int] = []

    def slow(piece: manifest_pb2.Slice, *rest: object) -> None:
        time.sleep(0.01)
        placed.append(piece.bucket)
        place(piece, *rest)  # type: ignore[arg-type]

    place = staging.place
    monkeypatch.setattr(staging, "place", slow)

    def send(rank: int) -> int:
        snapshot = Snapshot(folder=tmp_path, policy_step=1, rank=rank, num_bytes=0, total_bytes=0, seconds=0.0, plan=plan)
        return Sender(rank, torch.device("cpu"), threading.Event()).send([spec], 1, OpenSnapshot(snapshot), deadline_s=60.0)[0]

    with ThreadPoolExecutor(world) as pool:
        sent = [pool.submit(send, rank) for rank in range(world)]
        verified = Receiver().receive(spec, manifest, timeout_s=60.0)
        assert sum(future.result(60) for future in sent) == plan.total_bytes
    assert placed == sorted(placed) and len(placed) == len(plan.slices)
    rows = 8 // world
    for _, tensor in verified.tensors():  # rank r's rows hold bytes of r + 1
        assert tensor.view(torch.uint8).reshape(8, 4)[:, 0].tolist() == [rank + 1 for rank in range(world) for _ in range(rows)]
