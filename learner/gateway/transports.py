"""Which transport brings a version to a replica: what is configured, or the best that trainer's and replica's devices allow."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from learner.config import LearnerConfig
from learner.gateway.handshake import Claim
from protos.learner.v1alpha1 import learner_pb2 as pb

_NAMES = {"gloo": pb.TRANSPORT_GLOO, "nccl": pb.TRANSPORT_NCCL, "ipc": pb.TRANSPORT_IPC, "grpc": pb.TRANSPORT_GRPC, "folder": pb.TRANSPORT_FOLDER}
_BY_GROUPS = (pb.TRANSPORT_GLOO, pb.TRANSPORT_NCCL, pb.TRANSPORT_IPC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transports:
    """Example: Transports(preferred=TRANSPORT_NCCL, adapts=True) on a GPU machine with push.transport: auto."""

    preferred: pb.Transport
    adapts: bool  # False: configured by name, never replaced

    def of_replica(self, claim: Claim, trainer_devices: dict[int, str], taken: Collection[str]) -> tuple[pb.Transport, str]:
        """The replica's transport in an epoch, or UNSPECIFIED and why it cannot take part and fetches instead ("": nobody's fault).

        trainer_devices: rank to UUID, empty on CPU. taken: devices that other replicas of this epoch use by NCCL, which refuses two
        ranks on one device: with `auto` a shared device means CUDA IPC where the replica sees all of the trainer's devices, else gloo.
        """
        devices = set(claim.worker_devices or (claim.device_uuid,)) - {""}
        offered = [transport for transport in _BY_GROUPS if transport in claim.transports]
        if self.adapts:
            return next((t for t in self._wanted(claim, devices, trainer_devices, taken) if t in offered), pb.TRANSPORT_UNSPECIFIED), ""
        if self.preferred not in offered:
            return pb.TRANSPORT_UNSPECIFIED, ""
        if self.preferred == pb.TRANSPORT_NCCL:
            why = shared_device(devices, trainer_devices)
            return (pb.TRANSPORT_UNSPECIFIED, why) if why or devices & set(taken) else (self.preferred, "")
        if self.preferred == pb.TRANSPORT_IPC and (why := out_of_sight(claim.visible_devices, trainer_devices)):
            return pb.TRANSPORT_UNSPECIFIED, why
        return self.preferred, ""

    def _wanted(self, claim: Claim, devices: set[str], trainer_devices: dict[int, str], taken: Collection[str]) -> list[pb.Transport]:
        """Best first."""
        if self.preferred != pb.TRANSPORT_NCCL:
            return [self.preferred]
        if devices & set(trainer_devices.values()):
            seen = not out_of_sight(claim.visible_devices, trainer_devices)
            return [pb.TRANSPORT_IPC, pb.TRANSPORT_GLOO] if seen else [pb.TRANSPORT_GLOO]
        return [pb.TRANSPORT_GLOO] if not devices or devices & set(taken) else [pb.TRANSPORT_NCCL, pb.TRANSPORT_GLOO]


def transports_of(config: LearnerConfig) -> Transports:
    """As configured, else nccl where the trainer runs on a GPU. Raises ValueError for nccl or ipc without one."""
    wanted = config.push.transport
    if wanted in ("nccl", "ipc") and config.trainer.device == "auto" and not has_gpu():
        raise ValueError(f"push.transport={wanted} with trainer.device=auto, but this machine has no NVIDIA GPU: {wanted} moves memory of GPUs only; use transport auto or gloo")
    if wanted != "auto":
        return Transports(preferred=_NAMES[wanted], adapts=False)
    on_gpu = config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_gpu())
    return Transports(preferred=_NAMES["nccl" if on_gpu else "gloo"], adapts=True)


def has_gpu() -> bool:
    """Whether a trainer here would find a CUDA device, told without torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def shared_device(devices: Collection[str], trainer_devices: dict[int, str]) -> str:
    """Why a replica on `devices` cannot join an NCCL group of these trainer ranks; empty when it can."""
    shared = [(rank, used) for rank, used in trainer_devices.items() if used and used in devices]
    if not shared:
        return ""
    rank, device = shared[0]
    return (
        f"push.transport=nccl, but this replica and trainer rank {rank} are on one GPU ({device}), which NCCL refuses; it fetches by gRPC instead: "
        "set push.transport to ipc or auto, or give the replica a GPU of its own"
    )


def out_of_sight(visible: Collection[str], trainer_devices: dict[int, str]) -> str:
    """Why a replica that sees the devices `visible` cannot take memory of these trainer ranks by CUDA IPC; empty when it can."""
    for rank, device in sorted(trainer_devices.items()):
        if not device or device not in visible:
            return (
                f"push.transport=ipc, but trainer rank {rank} is on {device or 'a CPU'} and this replica sees {', '.join(sorted(visible)) or 'no GPU'}; it fetches by "
                "gRPC instead: run it on the trainer's machine with all of its GPUs visible, or set push.transport to nccl, gloo or auto"
            )
    return ""
