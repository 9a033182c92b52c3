"""Sends one rank's buckets of one version into its part of the group, from the snapshot's file and in the plan's order."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import learner_pb2
from protos.weights import marks
from protos.weights.group import Pending, TransferGroup
from protos.weights.membership import bounded, join
from protos.weights.side import Side
from protos.weights.staging import some


class OpenSnapshot:
    """What this rank sends of a snapshot, mapped: its own file, and those of its node that it is the root of. It stays readable after
    the folder is removed."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.roots = sorted({bucket.root for bucket in snapshot.plan.buckets})  # trainer ranks
        plan = snapshot.plan
        numbers = [number for number, bucket in enumerate(plan.buckets) if bucket.root == snapshot.rank]
        self._buckets = [plan.buckets[number] for number in numbers]
        inside: dict[int, dict[str, None]] = {number: {} for number in numbers}
        for piece in plan.slices:
            if piece.bucket in inside:
                inside[piece.bucket][plan.tensors[piece.tensor].name] = None
        self.names = [some(list(inside[number])) for number in numbers]  # of each bucket, for messages
        self.sizes = [bucket.num_bytes for bucket in self._buckets]
        self._files = {owner: _mapped(snapshot.folder / f"rank-{owner}.bin") for owner in {bucket.owner for bucket in self._buckets}}

    def bucket(self, number: int) -> torch.Tensor:
        """The rank's bucket by its own count, uint8 [num_bytes], a view of the file."""
        bucket = self._buckets[number]
        return self._files[bucket.owner][bucket.file_offset : bucket.file_offset + bucket.num_bytes]


def _mapped(path: Path) -> torch.Tensor:
    with path.open("rb") as file:
        # A private map: torch wants writable memory, and nothing writes to it.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Sender:
    """Keeps the groups of the last epoch while their keys are unchanged; any failure closes them. Used by the push thread alone."""

    def __init__(self, rank: int, device: torch.device, cancelled: threading.Event) -> None:
        self._rank = rank
        self._device = device
        self._cancelled = cancelled
        self._groups: dict[str, TransferGroup] = {}
        self._side = Side(device)
        self._shared: list[torch.Tensor] = []  # buckets that receivers have opened by CUDA IPC
        self.sent_bytes = 0  # of the last send, also where it failed
        self.peak_bytes = 0  # most bucket bytes held at once in it

    def send(self, specs: Sequence[learner_pb2.GroupSpec], version: int, snapshot: OpenSnapshot, *, deadline_s: float) -> tuple[int, int]:
        """Blocks until all receivers of all groups took all buckets. (bytes sent, peak bytes). Raises TransferError by the deadline."""
        self.sent_bytes = self.peak_bytes = 0
        if not snapshot.sizes:
            return 0, 0  # is no root, so receivers expect no group of it
        end = time.monotonic() + deadline_s
        try:
            self._connect(specs, snapshot.roots, end)
            self._send_buckets(specs, version, snapshot, end)
        except BaseException:
            self.close()
            raise
        return self.sent_bytes, self.peak_bytes

    def _send_buckets(self, specs: Sequence[learner_pb2.GroupSpec], version: int, snapshot: OpenSnapshot, end: float) -> None:
        """One collective at a time, over all groups; the next bucket is loaded while one is under way."""
        buffers = self._buffers(specs, max(snapshot.sizes))
        pending: tuple[Pending, int] | None = None
        for number, size in enumerate(snapshot.sizes):
            what = f"its bucket {number} of {len(snapshot.sizes)} ({size} bytes of {snapshot.names[number]}) of version {version}"
            on_host = snapshot.bucket(number)
            on_device = self._load(on_host, buffers, number) if buffers else on_host
            for spec in specs:
                self._finish(pending)
                data = on_host if spec.transport == learner_pb2.TRANSPORT_GLOO else on_device
                pending = self._groups[_key(spec)].start(data, part=snapshot.roots.index(self._rank), what=what, timeout_s=bounded(spec.collective_timeout_s, end)), size
        self._finish(pending)

    def _finish(self, pending: tuple[Pending, int] | None) -> None:
        if pending is not None:
            collective, size = pending
            with marks.span("send"):
                collective.wait(self._cancelled)
            self.sent_bytes += size

    def close(self) -> None:
        """Closes the groups; returns at once."""
        for group in self._groups.values():
            group.close()
        self._groups, self._shared = {}, []

    def _connect(self, specs: Sequence[learner_pb2.GroupSpec], roots: Sequence[int], end: float) -> None:
        wanted = {_key(spec): spec for spec in specs}
        if self._groups.keys() - wanted.keys():
            self.close()
        for key, spec in wanted.items():
            if key not in self._groups:
                device = torch.device("cpu") if spec.transport == learner_pb2.TRANSPORT_GLOO else self._device
                self._groups[key] = join(spec, roots, root=self._rank, timeout_s=bounded(spec.collective_timeout_s, end), device=device, cancelled=self._cancelled)

    def _buffers(self, specs: Sequence[learner_pb2.GroupSpec], largest_bytes: int) -> list[torch.Tensor]:
        """Two device buckets for NCCL and IPC; none where all goes by gloo, which sends straight from the mapped file. For IPC they are kept as long
        as their groups: memory that receivers have opened is never freed (torch keeps it for them), and new memory would have to be opened anew."""
        if all(spec.transport == learner_pb2.TRANSPORT_GLOO for spec in specs):
            self.peak_bytes = largest_bytes
            return []
        self.peak_bytes = 2 * largest_bytes
        if self._shared and self._shared[0].numel() >= largest_bytes:
            return self._shared
        with self._side.open():
            made = [torch.empty(largest_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._shared = made if any(spec.transport == learner_pb2.TRANSPORT_IPC for spec in specs) else []
        return made

    def _load(self, data: torch.Tensor, buffers: list[torch.Tensor], number: int) -> torch.Tensor:
        target = buffers[number % 2][: len(data)]
        with marks.span("load"), self._side.open():  # not behind the training step's kernels
            self._side.windows.to_device(data, target)
        return target


def _key(spec: learner_pb2.GroupSpec) -> str:
    return f"{spec.store_host}:{spec.store_port}/{spec.group_key}"
