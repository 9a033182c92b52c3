"""Receives one version from the trainer ranks: bucket after bucket in manifest order, two buffers, one collective at a time.

    collective i+1 into one buffer  |  digest and copy of bucket i out of the other
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protos import faultpoints
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.group import GroupAddress, Pending, TransferGroup, Transport
from protos.weights.staging import Keep, Staging, VerifiedStaging

_TRANSPORTS: dict[int, Transport] = {learner_pb2.TRANSPORT_GLOO: "gloo", learner_pb2.TRANSPORT_NCCL: "nccl", learner_pb2.TRANSPORT_IPC: "ipc"}


def owner_address(spec: learner_pb2.GroupSpec, owner: int) -> GroupAddress:
    """Address of the group that `owner` (a root) sends in. Raises TransferError for a transport without groups."""
    transport = _TRANSPORTS.get(spec.transport)
    if transport is None:
        raise TransferError(f"group {spec.group_key}: transport {spec.transport} is none of gloo, nccl and ipc")
    key = f"{spec.group_key}/owner-{owner}"
    return GroupAddress(transport=transport, host=spec.store_host, port=spec.store_port, key=key)


def roles(spec: learner_pb2.GroupSpec, owner: int) -> list[str]:
    """Who is who in a root's group, for messages."""
    names = list(spec.receivers) or [""] * spec.num_receivers
    return [f"trainer rank {owner}", *(f"receiver {rank}" + f" ({name})" * bool(name) for rank, name in enumerate(names, start=1))]


def senders(manifest: manifest_pb2.Manifest) -> list[int]:
    """Roots, in order of their rank: only they make a group."""
    return sorted({bucket.root for bucket in manifest.buckets})


class Receiver:
    """One receiving worker's end: number `worker` of its replica, keeping `keep` of every tensor. Groups are kept while the group key is
    unchanged; any failure closes them."""

    def __init__(self, device: torch.device | None = None, *, worker: int = 0, keep: Keep | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._worker = worker
        self._keep = keep
        self.peak_bytes = 0  # of staging and buckets, in the last transfer
        self._key = ""
        self._groups: dict[int, TransferGroup] = {}

    def receive(
        self,
        spec: learner_pb2.GroupSpec,
        manifest: manifest_pb2.Manifest,
        *,
        timeout_s: float,
        cancelled: threading.Event | None = None,
    ) -> VerifiedStaging:
        """Blocks until the version is whole and verified. Raises TransferError within timeout_s, and soon after `cancelled` is set."""
        end = time.monotonic() + timeout_s
        staging = Staging(manifest, self._device, self._keep)
        try:
            self._connect(spec, senders(manifest), end, cancelled)
            with own_stream(self._device):
                self._receive_buckets(spec, manifest, staging, end, cancelled)
        except BaseException:
            self.close()
            raise
        return staging.verify()

    def close(self) -> None:
        """Closes the groups; returns at once."""
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self._key = ""

    def _connect(self, spec: learner_pb2.GroupSpec, owners: list[int], end: float, cancelled: threading.Event | None) -> None:
        key = f"{spec.store_host}:{spec.store_port}/{spec.group_key}/{spec.receiver_rank + self._worker}"
        if key != self._key:
            self.close()
        for owner in owners:
            if owner not in self._groups:
                self._groups[owner] = TransferGroup.connect(
                    owner_address(spec, owner),
                    rank=spec.receiver_rank + self._worker,
                    roles=roles(spec, owner),
                    timeout_s=bounded(spec.collective_timeout_s, end),
                    device=self._wire_device(spec),
                    cancelled=cancelled,
                )
        self._key = key

    def _wire_device(self, spec: learner_pb2.GroupSpec) -> torch.device:
        """Where buckets arrive: NCCL and IPC on the device, gloo on the CPU even where staging is on a GPU."""
        return torch.device("cpu") if spec.transport == learner_pb2.TRANSPORT_GLOO else self._device

    def _receive_buckets(
        self,
        spec: learner_pb2.GroupSpec,
        manifest: manifest_pb2.Manifest,
        staging: Staging,
        end: float,
        cancelled: threading.Event | None,
    ) -> None:
        buckets = manifest.buckets
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=self._wire_device(spec)) for _ in range(min(2, len(buckets)))]
        self.peak_bytes = staging.num_bytes + largest * len(buffers)

        def start(index: int) -> Pending:
            bucket = buckets[index]
            what = f"bucket {index} of {len(buckets)} ({bucket.num_bytes} bytes) of version {manifest.version}"
            view = buffers[index % 2][: bucket.num_bytes]
            return self._groups[bucket.root].start(view, root=0, what=what, timeout_s=bounded(spec.collective_timeout_s, end))

        pending = start(0) if buckets else None
        for index, bucket in enumerate(buckets):
            assert pending is not None
            faultpoints.point("receive_bucket")
            pending.wait(cancelled)
            pending = start(index + 1) if index + 1 < len(buckets) else None
            staging.write_bucket(index, buffers[index % 2][: bucket.num_bytes])


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Copies inside wait for nothing but one another, and are done afterwards: an engine's step shares the default stream."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def bounded(timeout_s: float, end: float) -> float:
    """A collective's timeout, cut at the deadline of the whole. Raises TransferError once that has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise TransferError("the deadline of the whole transfer has passed")
    return min(timeout_s, left)
