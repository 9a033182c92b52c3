"""Receives one version from the trainer ranks: bucket after bucket in manifest order, two buffers, one collective at a time.

    collective i+1 into one buffer  |  digest and copy of bucket i out of the other
"""

from __future__ import annotations

import threading
import time

import torch

from protos import faultpoints
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import marks
from protos.weights.group import Pending, TransferGroup
from protos.weights.membership import bounded, join, senders
from protos.weights.side import Side
from protos.weights.staging import Keep, Staging, VerifiedStaging


class Receiver:
    """One receiving worker's end: number `worker` of its replica, keeping `keep` of every tensor. The group is kept while its key is
    unchanged; any failure closes it."""

    def __init__(self, device: torch.device | None = None, *, worker: int = 0, keep: Keep | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._worker = worker
        self._keep = keep
        self.side = Side(self._device)
        self.peak_bytes = 0  # of staging and buckets, in the last transfer
        self._key = ""
        self._group: TransferGroup | None = None

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
        try:
            with self.side.open():
                with marks.span("staging"):
                    staging = Staging(manifest, self._device, self._keep, side=self.side)
                if manifest.buckets:
                    with marks.span("connect"):
                        group = self._connect(spec, senders(manifest), end, cancelled)
                    self._receive_buckets(group, spec, manifest, staging, end, cancelled)
        except BaseException:
            self.close()
            raise
        return staging.verify()

    def close(self) -> None:
        """Closes the group; returns at once."""
        if self._group is not None:
            self._group.close()
        self._group, self._key = None, ""

    def _connect(self, spec: learner_pb2.GroupSpec, roots: list[int], end: float, cancelled: threading.Event | None) -> TransferGroup:
        key = f"{spec.store_host}:{spec.store_port}/{spec.group_key}/{spec.receiver_rank + self._worker}/{roots}"
        if key != self._key:
            self.close()
        if self._group is None:
            timeout_s = bounded(spec.collective_timeout_s, end)
            self._group = join(spec, roots, worker=self._worker, timeout_s=timeout_s, device=self._wire_device(spec), cancelled=cancelled)
        self._key = key
        return self._group

    def _wire_device(self, spec: learner_pb2.GroupSpec) -> torch.device:
        """Where buckets arrive: NCCL and IPC on the device, gloo on the CPU even where staging is on a GPU."""
        return torch.device("cpu") if spec.transport == learner_pb2.TRANSPORT_GLOO else self._device

    def _receive_buckets(
        self,
        group: TransferGroup,
        spec: learner_pb2.GroupSpec,
        manifest: manifest_pb2.Manifest,
        staging: Staging,
        end: float,
        cancelled: threading.Event | None,
    ) -> None:
        buckets, roots = manifest.buckets, senders(manifest)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        with marks.span("buckets"):
            buffers = [torch.empty(largest, dtype=torch.uint8, device=self._wire_device(spec)) for _ in range(min(2, len(buckets)))]
        self.peak_bytes = staging.num_bytes + largest * len(buffers)

        def start(index: int) -> Pending:
            bucket = buckets[index]
            what = f"bucket {index} of {len(buckets)} ({bucket.num_bytes} bytes of {staging.names_in(index)}) of version {manifest.version}"
            view = buffers[index % 2][: bucket.num_bytes]
            return group.start(view, part=roots.index(bucket.root), what=what, timeout_s=bounded(spec.collective_timeout_s, end))

        pending = start(0)
        for index, bucket in enumerate(buckets):
            faultpoints.point("receive_bucket")
            with marks.span("arrive"):
                pending.wait(cancelled)
            if index + 1 < len(buckets):
                pending = start(index + 1)
            staging.write_bucket(index, buffers[index % 2][: bucket.num_bytes])

