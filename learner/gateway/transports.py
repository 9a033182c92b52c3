"""Which transport an epoch uses: what is configured, or the best that this epoch's devices allow."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from learner.config import LearnerConfig
from protos.learner.v1alpha1 import learner_pb2 as pb

_NAMES = {"gloo": pb.TRANSPORT_GLOO, "nccl": pb.TRANSPORT_NCCL, "grpc": pb.TRANSPORT_GRPC}


@dataclass(frozen=True, kw_only=True, slots=True)
class Transports:
    """Example: Transports(preferred=TRANSPORT_NCCL, adapts=True) on a GPU machine with push.transport: auto."""

    preferred: pb.Transport
    adapts: bool  # False: configured by name, never replaced

    def of_epoch(self, trainer_devices: Iterable[str], replica_devices: Iterable[str]) -> pb.Transport:
        """NCCL refuses two ranks on one device: with `auto`, a device that a trainer rank and a replica share turns NCCL into gloo.

        Devices are UUIDs; empty ones (CPU) are shared with nobody.
        """
        shared = (set(trainer_devices) & set(replica_devices)) - {""}
        return pb.TRANSPORT_GLOO if self.adapts and self.preferred == pb.TRANSPORT_NCCL and shared else self.preferred


def transports_of(config: LearnerConfig) -> Transports:
    """As configured, else nccl where the trainer runs on a GPU. Raises ValueError for nccl without one."""
    if config.push.transport == "nccl" and config.trainer.device == "auto" and not has_gpu():
        raise ValueError("push.transport=nccl with trainer.device=auto, but this machine has no NVIDIA GPU: NCCL moves memory of GPUs only; use transport auto or gloo")
    if config.push.transport != "auto":
        return Transports(preferred=_NAMES[config.push.transport], adapts=False)
    on_gpu = config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_gpu())
    return Transports(preferred=_NAMES["nccl" if on_gpu else "gloo"], adapts=True)


def has_gpu() -> bool:
    """Whether a trainer here would find a CUDA device, told without torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def shared_device(device: str, trainer_devices: dict[int, str]) -> str:
    """Why a replica on `device` cannot join an NCCL group of these trainer ranks; empty when it can."""
    ranks = [rank for rank, used in trainer_devices.items() if device and used == device]
    if not ranks:
        return ""
    return (
        f"push.transport=nccl, but this replica and trainer rank {ranks[0]} are on one GPU ({device}), which NCCL refuses; it fetches by gRPC instead: "
        "set push.transport to gloo or auto, or give the replica a GPU of its own"
    )
