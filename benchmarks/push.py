"""A version from one trainer rank to replicas, against one bare broadcast of the same bytes: `python -m benchmarks.push --json`.

Every process is real: a trainer rank that sends its snapshot (plan, buckets, the group with its deadlines) and N receivers that digest
every slice, copy it into staging and apply it to a model's parameters by the flat plan. The peer is torch.distributed.broadcast of one
flat tensor of the same bytes among the same processes. With --transport nccl (receiver i on GPU i + 1, the trainer on GPU 0) the bars
count; gloo on a CPU goes through the same motions and prints the same line.

vs_broadcast    seconds of a push with apply over seconds of the bare broadcast
seven_vs_one    seconds of a push to the largest number of receivers over seconds of one to a single receiver
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _line
from benchmarks._line import ROOT, Bar, Pair
from benchmarks._update_trainer import spec_of
from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import SnapshotWriter
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.backends import tolerate_push_failures
from protos.weights.receiver import Receiver

WIDTH = 1024
TIMEOUT_S = 60.0


def model(num_bytes: int) -> nn.Module:
    """Square bfloat16 matrices of about num_bytes in all."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(max(1, num_bytes // (2 * WIDTH * WIDTH)))]
    torch.manual_seed(1)
    for layer in layers:
        nn.init.normal_(layer.weight)
    return nn.Sequential(*layers)


def device_of(transport: str, number: int) -> torch.device:
    return torch.device("cuda", number) if transport == "nccl" else torch.device("cpu")


class Peer:
    """What receivers and trainer share: the bare group of the peer's broadcast."""

    def __init__(self, rank: int, size: int, store: dist.TCPStore, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            tolerate_push_failures()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.PrefixStore("bare", store), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def broadcast(self, flat: torch.Tensor) -> float:
        self.barrier()
        began = time.perf_counter()
        dist.broadcast(flat, src=0)
        self.synchronize()
        self.barrier()
        return time.perf_counter() - began


def receive(arguments: argparse.Namespace) -> None:
    """One receiver: pushes and broadcasts in turns, as often as the trainer says."""
    device = device_of(arguments.transport, arguments.rank)
    peer = Peer(arguments.rank, arguments.receivers + 1, dist.TCPStore("127.0.0.1", arguments.store, is_master=False, wait_for_workers=False), device)
    net, flat = model(arguments.bytes).to(device), torch.empty(arguments.bytes, dtype=torch.uint8, device=device)
    receiver = Receiver(device)
    manifest = manifest_pb2.Manifest.FromString(Path(arguments.manifest).read_bytes())
    parameters = dict(net.named_parameters())
    for turn in range(arguments.turns):
        for what in ("push", "broadcast") if turn % 2 else ("broadcast", "push"):
            if what == "broadcast":
                peer.broadcast(flat)
                continue
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.zero_()
            peer.barrier()
            spec = spec_of(arguments.transport, arguments.store, num_receivers=arguments.receivers, receiver_rank=arguments.rank)
            staging = receiver.receive(spec, manifest, timeout_s=TIMEOUT_S)
            tensors = dict(staging.tensors())
            with torch.no_grad():
                torch._foreach_copy_([parameters[name] for name in tensors], list(tensors.values()))
            peer.synchronize()
            peer.barrier()
            expected = model(arguments.bytes).to(device) if turn == 0 else None
            if expected is not None and not all(torch.equal(a, b) for a, b in zip(net.parameters(), expected.parameters(), strict=True)):
                raise RuntimeError("other weights arrived than were sent")


def send(arguments: argparse.Namespace) -> list[Pair]:
    """The trainer rank: the seconds of each turn."""
    device = device_of(arguments.transport, 0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        net = model(arguments.bytes)
        writer = SnapshotWriter(net, root=Path(name) / "snapshots", incarnation=1, served_dtype="bfloat16", bucket_bytes=arguments.bucket_mib << 20)
        snapshot = writer.write(1)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
        common = ["--transport", arguments.transport, "--receivers", str(arguments.receivers), "--turns", str(arguments.turns), "--bytes", str(arguments.bytes), "--store", str(store.port), "--manifest", str(snapshot.folder / "manifest.bin")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))), "OMP_NUM_THREADS": "1"}
        children = [subprocess.Popen([sys.executable, "-m", "benchmarks.push", "--role", "receive", "--rank", str(rank), *common], env=environment, cwd=ROOT) for rank in range(1, arguments.receivers + 1)]
        try:
            peer = Peer(0, arguments.receivers + 1, store, device)
            flat = torch.ones(arguments.bytes, dtype=torch.uint8, device=device)
            sender, pairs = Sender(0, device, threading.Event()), []
            for turn in range(arguments.turns):
                found: dict[str, float] = {}
                for what in ("push", "broadcast") if turn % 2 else ("broadcast", "push"):
                    if what == "broadcast":
                        found["broadcast_s"] = peer.broadcast(flat)
                        continue
                    peer.barrier()
                    began = time.perf_counter()
                    sender.send([spec_of(arguments.transport, store.port, num_receivers=arguments.receivers)], 1, OpenSnapshot(snapshot), deadline_s=TIMEOUT_S)
                    peer.barrier()
                    found["push_s"] = time.perf_counter() - began
                pairs.append({"push_s": found["push_s"], "broadcast_s": found["broadcast_s"]})
        finally:
            for child in children:
                child.wait(TIMEOUT_S)
        if any(child.returncode for child in children):
            raise RuntimeError("a receiver failed; its error is on stderr")
        dist.destroy_process_group()
    return pairs[2:]  # the first two make groups and memory


def group(arguments: argparse.Namespace, receivers: int) -> list[Pair]:
    """The turns with so many receivers, in a process of its own: a default group is made once in a process."""
    command = [sys.executable, "-m", "benchmarks.push", "--role", "send", "--transport", arguments.transport, "--receivers", str(receivers), "--turns", str(arguments.turns + 2), "--bytes", str(arguments.bytes), "--bucket-mib", str(arguments.bucket_mib)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    pairs: list[Pair] = json.loads(done.stdout.splitlines()[-1])
    return pairs


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--transport", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--receivers", type=int, default=0, help="most receivers; 0: one less than the GPUs, or 3 on a CPU")
    parser.add_argument("--bytes", type=int, default=0, help="of a version; 0: 1 GiB on GPUs, 32 MiB on a CPU")
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--turns", type=int, default=_line.MIN_PAIRS)
    parser.add_argument("--role", choices=("", "send", "receive"), default="", help=argparse.SUPPRESS)
    for name in ("--rank", "--store"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--manifest", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.bytes = arguments.bytes or (1 << 30 if arguments.transport == "nccl" else 32 << 20)
    if arguments.role == "receive":
        receive(arguments)
    elif arguments.role == "send":
        print(json.dumps(send(arguments)))
    else:
        _report(arguments)


def _report(arguments: argparse.Namespace) -> None:
    most = arguments.receivers or (torch.cuda.device_count() - 1 if arguments.transport == "nccl" else 3)
    if most < 1:
        raise SystemExit(f"--transport {arguments.transport} needs a GPU for the trainer and one for each receiver; this machine has {torch.cuda.device_count()}")
    many, one = group(arguments, most), group(arguments, 1)
    pairs = [{**pair, "push_to_one_s": single["push_s"]} for pair, single in zip(many, one, strict=True)]
    bars = [
        Bar(name="vs_broadcast", value=_line.ratio(pairs, "push_s", "broadcast_s"), op="<=", bar=1.5),
        Bar(name="seven_vs_one", value=_line.ratio(pairs, "push_s", "push_to_one_s"), op="<=", bar=1.3),
    ]
    notes: dict[str, Any] = {"transport": arguments.transport, "receivers": most, "num_bytes": arguments.bytes}
    _line.report("push", bars=bars, pairs=pairs, packages=("torch",), quiet=arguments.json, notes=notes)


if __name__ == "__main__":
    main()
