"""Sends one rank's buckets of one version into the group it owns, from the snapshot's file and in the plan's order."""

from __future__ import annotations

import mmap
import threading
import time

import torch

from learner.weights.snapshot import Snapshot
from protos.learner.v1alpha1 import learner_pb2
from protos.weights.group import Pending, TransferGroup
from protos.weights.receiver import bounded, owner_address, roles


class OpenSnapshot:
    """This rank's file of a snapshot, mapped: it stays readable after the folder is removed."""

    def __init__(self, snapshot: Snapshot) -> None:
        mine = [bucket for bucket in snapshot.plan.buckets if bucket.owner == snapshot.rank]
        self.spans = [(bucket.file_offset, bucket.num_bytes) for bucket in mine]
        self._data = torch.empty(0, dtype=torch.uint8)
        if mine:
            with (snapshot.folder / f"rank-{snapshot.rank}.bin").open("rb") as file:
                # A private map: torch wants writable memory, and nothing writes to it.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._data = torch.frombuffer(memory, dtype=torch.uint8)

    def bucket(self, number: int) -> torch.Tensor:
        """The rank's bucket by its own count, uint8 [num_bytes], a view of the file."""
        start, size = self.spans[number]
        return self._data[start : start + size]


class Sender:
    """Keeps the group of the last epoch while its key is unchanged; any failure closes it. Used by the push thread alone."""

    def __init__(self, rank: int, device: torch.device, cancelled: threading.Event) -> None:
        self._rank = rank
        self._device = device
        self._cancelled = cancelled
        self._group: TransferGroup | None = None
        self._key = ""
        self.sent_bytes = 0  # of the last send, also where it failed
        self.peak_bytes = 0  # most bucket bytes held at once in it

    def send(self, spec: learner_pb2.GroupSpec, version: int, snapshot: OpenSnapshot, *, deadline_s: float) -> tuple[int, int]:
        """Blocks until all receivers took all buckets. (bytes sent, peak bytes). Raises TransferError by the deadline."""
        self.sent_bytes = self.peak_bytes = 0
        if not snapshot.spans:
            return 0, 0  # owns nothing, so receivers expect no group of it
        end = time.monotonic() + deadline_s
        try:
            group = self._connect(spec, end)
            self._send_buckets(group, spec, version, snapshot, end)
        except BaseException:
            self.close()
            raise
        return self.sent_bytes, self.peak_bytes

    def _send_buckets(self, group: TransferGroup, spec: learner_pb2.GroupSpec, version: int, snapshot: OpenSnapshot, end: float) -> None:
        """One collective at a time; the next bucket is loaded while one is under way."""
        buffers = self._buffers(spec, max(size for _, size in snapshot.spans))
        pending: tuple[Pending, int] | None = None
        for number, (_, size) in enumerate(snapshot.spans):
            what = f"its bucket {number} of {len(snapshot.spans)} ({size} bytes) of version {version}"
            data = self._load(snapshot.bucket(number), buffers, number)
            self._finish(pending)
            timeout_s = bounded(spec.collective_timeout_s, end)
            pending = group.start(data, root=0, what=what, timeout_s=timeout_s), size
        self._finish(pending)

    def _finish(self, pending: tuple[Pending, int] | None) -> None:
        if pending is not None:
            collective, size = pending
            collective.wait(self._cancelled)
            self.sent_bytes += size

    def close(self) -> None:
        """Closes the group; returns at once."""
        if self._group is not None:
            self._group.close()
        self._group, self._key = None, ""

    def _connect(self, spec: learner_pb2.GroupSpec, end: float) -> TransferGroup:
        key = f"{spec.store_host}:{spec.store_port}/{spec.group_key}"
        if self._group is None or key != self._key:
            self.close()
            self._group = TransferGroup.connect(
                owner_address(spec, self._rank),
                rank=0,
                roles=roles(spec, self._rank),
                timeout_s=bounded(spec.collective_timeout_s, end),
                device=self._device if spec.transport == learner_pb2.TRANSPORT_NCCL else torch.device("cpu"),
                cancelled=self._cancelled,
            )
            self._key = key
        return self._group

    def _buffers(self, spec: learner_pb2.GroupSpec, largest_bytes: int) -> list[torch.Tensor]:
        """Two device buckets for NCCL; none for gloo, which sends straight from the mapped file."""
        if spec.transport != learner_pb2.TRANSPORT_NCCL:
            self.peak_bytes = largest_bytes
            return []
        self.peak_bytes = 2 * largest_bytes
        return [torch.empty(largest_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _load(self, data: torch.Tensor, buffers: list[torch.Tensor], number: int) -> torch.Tensor:
        if not buffers:
            return data
        target = buffers[number % 2][: len(data)]
        stream = torch.cuda.Stream(self._device)  # not behind the training step's kernels
        with torch.cuda.stream(stream):
            target.copy_(data)
        stream.synchronize()
        return target
