"""Who belongs to an epoch's group and in which part of it a root sends: the same reckoning at the trainer's ranks and at the replicas.

    ranks   roots in order of their trainer rank, then the receivers: roots 0 and 2 with receivers 1, 2 are ranks 0, 1, 2, 3
    parts   one for each root, {root, receivers}: (0, 2, 3) and (1, 2, 3)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.group import GroupAddress, TransferGroup, Transport

_TRANSPORTS: dict[int, Transport] = {learner_pb2.TRANSPORT_GLOO: "gloo", learner_pb2.TRANSPORT_NCCL: "nccl", learner_pb2.TRANSPORT_IPC: "ipc"}


def join(
    spec: learner_pb2.GroupSpec,
    roots: Sequence[int],
    *,
    timeout_s: float,
    root: int | None = None,
    worker: int = 0,
    device: torch.device | None = None,
    cancelled: threading.Event | None = None,
) -> TransferGroup:
    """Joins the group of `roots` (trainer ranks, ascending) as the trainer rank `root`, or as number `worker` of the receiver that spec names.
    Part i is that of roots[i]. Raises TransferError for a transport without groups, and as TransferGroup.connect."""
    rank = len(roots) + spec.receiver_rank - 1 + worker if root is None else roots.index(root)
    everybody, receivers = roles(spec, roots), range(len(roots), len(roots) + spec.num_receivers)
    parts = [(number, *receivers) for number in range(len(roots))]
    return TransferGroup.connect(address(spec, roots), rank=rank, roles=everybody, timeout_s=timeout_s, device=device, cancelled=cancelled, parts=parts)


def address(spec: learner_pb2.GroupSpec, roots: Sequence[int]) -> GroupAddress:
    """Raises TransferError for a transport without groups."""
    transport = _TRANSPORTS.get(spec.transport)
    if transport is None:
        raise TransferError(f"group {spec.group_key}: transport {spec.transport} is none of gloo, nccl and ipc")
    key = f"{spec.group_key}/roots-{'.'.join(map(str, roots))}"
    return GroupAddress(transport=transport, host=spec.store_host, port=spec.store_port, key=key)


def roles(spec: learner_pb2.GroupSpec, roots: Sequence[int]) -> list[str]:
    """Who is who, for messages."""
    names = list(spec.receivers) or [""] * spec.num_receivers
    return [*(f"trainer rank {root}" for root in roots), *(f"receiver {rank}" + f" ({name})" * bool(name) for rank, name in enumerate(names, start=1))]


def senders(manifest: manifest_pb2.Manifest) -> list[int]:
    """Roots, in order of their rank: only they belong to the group."""
    return sorted({bucket.root for bucket in manifest.buckets})


def bounded(timeout_s: float, end: float) -> float:
    """A collective's timeout, cut at the deadline of the whole. Raises TransferError once that has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise TransferError("the deadline of the whole transfer has passed")
    return min(timeout_s, left)
