"""Two FSDP2 ranks push a tiny Llama to two receivers: real processes, real gloo, a gateway reduced to its FeedService."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc, learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WORLD = 2


class Process:
    """A child that answers lines with JSON lines."""

    def __init__(self, script: str, *arguments: object) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def tell(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"the process ended with {self.child.wait(5)}"
        return json.loads(line)


@dataclass
class Gateway(feed_pb2_grpc.FeedServiceServicer):
    """Gives every epoch to `members`, which are told what a replica would be told."""

    root: Path
    replicas: list[Process]
    members: list[int] = field(default_factory=lambda: [0, 1])
    key: str = "1"
    collective_timeout_s: float = 10.0
    epoch: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(WORLD, action=self._settle)
        self.ended = threading.Barrier(WORLD)
        self.requests: dict[int, feed_pb2.BeginUpdateRequest] = {}
        self.ends: dict[int, feed_pb2.EndUpdateRequest] = {}
        self.retry = False

    def _settle(self) -> None:
        self.epoch += 1
        first = self.requests[0]
        self.spec = learner_pb2.GroupSpec(
            transport=learner_pb2.TRANSPORT_GLOO,
            store_host=first.store_host,
            store_port=first.store_port,
            group_key=self.key,
            num_owners=WORLD,
            num_receivers=len(self.members),
            collective_timeout_s=self.collective_timeout_s,
        )
        manifest = manifest_pb2.Manifest.FromString((self.root / f"11-{first.version}" / "manifest.bin").read_bytes())
        manifest.version = first.version
        for rank, member in enumerate(self.members, start=1):
            spec = learner_pb2.GroupSpec()
            spec.CopyFrom(self.spec)
            spec.receiver_rank = rank
            self.replicas[member].tell(f"{spec.SerializeToString().hex()} {manifest.SerializeToString().hex()} {first.version}")

    def BeginUpdate(self, request: feed_pb2.BeginUpdateRequest, context: grpc.ServicerContext) -> feed_pb2.BeginUpdateResponse:
        self.requests[request.rank] = request
        self.barrier.wait(20)
        return feed_pb2.BeginUpdateResponse(epoch=self.epoch, members=[f"replica-{m}" for m in self.members], group=self.spec)

    def EndUpdate(self, request: feed_pb2.EndUpdateRequest, context: grpc.ServicerContext) -> feed_pb2.EndUpdateResponse:
        self.ends[request.rank] = request
        self.ended.wait(30)
        outcomes = [feed_pb2.MemberOutcome(replica_id=f"replica-{m}", phase=learner_pb2.UPDATE_PHASE_RECEIVED) for m in self.members]
        if request.rank == 0 and self.retry:
            self.members, self.key = [0], "retry"
        self.ended.wait(30)
        retry, ok = self.retry, all(end.ok for end in self.ends.values())
        return feed_pb2.EndUpdateResponse(outcomes=outcomes if ok else [], retry=retry and not ok)


@dataclass
class World:
    """Everything that runs for this module's tests."""

    gateway: Gateway
    ranks: list[Process]
    replicas: list[Process]
    model: Path

    def push(self, version: int) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.tell(f"push {version}")
        return [rank.answer() for rank in self.ranks]

    def expected(self, version: int) -> dict[str, str]:
        """xxh3 of each tensor of the model times the version, as bfloat16 (the scaling by a power of two is exact)."""
        tensors = load_file(self.model / "model.safetensors")
        return {name: _digest((tensor.float() * version).bfloat16()) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("push")
    replicas = [Process("push_replica.py") for _ in range(2)]
    gateway = Gateway(root=folder / "snapshots", replicas=replicas)
    server = grpc.server(ThreadPoolExecutor(8))
    feed_pb2_grpc.add_FeedServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ranks = [Process("push_rank.py", r, WORLD, folder / "init", f"127.0.0.1:{port}", tiny_model, gateway.root) for r in range(WORLD)]
    for process in [*replicas, *ranks]:
        assert process.answer() == {"ready": True}
    yield World(gateway=gateway, ranks=ranks, replicas=replicas, model=tiny_model)
    server.stop(0)
    for process in [*ranks, *replicas]:
        process.child.kill()
        process.child.wait()


def test_every_receiver_gets_every_byte_and_no_rank_gathers(world: World) -> None:
    numbers = world.push(2)
    for replica in world.replicas:
        answer = replica.answer()
        assert answer["phase"] == "ready", answer["detail"]
        assert answer["digests"] == world.expected(2)
    for number in numbers:
        assert number["idle"] and number["num_pushed"] == 1 and number["num_failed"] == 0, number
        assert number["bytes_rooted"] == number["own_bytes"] and number["gathered"] == 0
        assert number["peak_bytes"] <= 20_000 and number["outcomes"] == {"received": 2}
    total = sum(tensor.numel() * 2 for tensor in load_file(world.model / "model.safetensors").values())
    assert sum(number["bytes_rooted"] for number in numbers) == total
    # 259 rows of the embedding are 130 + 129; all other tensors are even: roots differ by a row of 64 bfloat16.
    assert abs(numbers[0]["own_bytes"] - numbers[1]["own_bytes"]) == 64 * 2


def test_the_next_version_goes_through_the_same_groups(world: World) -> None:
    world.push(4)
    for replica in world.replicas:
        assert replica.answer()["digests"] == world.expected(4)


def test_a_receiver_stopped_mid_epoch_costs_that_epoch_and_the_retry_without_it_succeeds(world: World) -> None:
    gateway = world.gateway
    gateway.collective_timeout_s, gateway.retry, gateway.key = 2.0, True, "with-a-stopped-one"
    world.replicas[1].child.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        numbers = world.push(8)
    finally:
        world.replicas[1].child.send_signal(signal.SIGCONT)
    assert time.monotonic() - began < 15
    for number in numbers:
        assert number["num_failed"] == 1 and number["num_pushed"] == 3, number
        assert number["last_version"] == 8 and number["last_error"] == ""
    failed = world.replicas[0].answer()
    assert failed["phase"] == "failed" and "receiver 2 did not appear in time" in failed["detail"]
    assert world.replicas[0].answer()["digests"] == world.expected(8)
    assert world.replicas[1].answer()["phase"] == "failed"  # woken, it finds the epoch gone and lives on


def test_the_woken_receiver_takes_part_in_the_next_epoch_with_the_same_process(world: World) -> None:
    world.gateway.members, world.gateway.key, world.gateway.retry = [0, 1], "together-again", False
    world.gateway.collective_timeout_s = 10.0
    world.push(16)
    for replica in world.replicas:
        assert replica.answer()["digests"] == world.expected(16)


def test_closing_ends_the_threads_in_time(world: World) -> None:
    for rank in world.ranks:
        assert rank.child.stdin is not None
        rank.child.stdin.close()
    assert [rank.answer() for rank in world.ranks] == [{"closed": True}] * WORLD
    assert [rank.child.wait(20) for rank in world.ranks] == [0, 0]
