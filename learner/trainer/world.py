"""The ranks as one world: process group, device mesh, and what all of them must agree on at the start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from learner.trainer.rounds import fresh
from protos.gpus import check_given

_TIMEOUT = timedelta(minutes=20)  # ranks wait for one another while one of them waits for the gateway; a dead rank is noticed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the ranks. Example: World(rank=0, size=2, device=torch.device("cpu"), mesh=mesh, incarnation=1733025600000000000)"""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    incarnation: int  # nanoseconds since the epoch, the same on all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank stands and how it finds the others. Empty rendezvous: MASTER_ADDR and MASTER_PORT of the environment.

    Example: Place(rank=0, size=2, rendezvous="file:///tmp/r", incarnation=None)
    """

    rank: int
    size: int
    rendezvous: str  # "file:///path", "tcp://host:port", a path, host:port, or empty
    incarnation: int | None  # None: rank 0 makes one

    @staticmethod
    def from_environment() -> Place:
        """As torchrun sets it. Raises ValueError when it is not set."""
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"neither --rank, --world-size and --rendezvous nor the environment says where this rank stands: {', '.join(missing)} not set; use `python -m learner`, or torchrun")
        return Place(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), rendezvous="", incarnation=None)


def init_method(rendezvous: str) -> str:
    """torch's spelling of a rendezvous."""
    if not rendezvous:
        return "env://"
    if "://" in rendezvous:
        return rendezvous
    return f"tcp://{rendezvous}" if ":" in rendezvous and "/" not in rendezvous else f"file://{os.path.abspath(rendezvous)}"


def resolve_device(wanted: str, rank: int, num_ranks: int = 1) -> torch.device:
    """"auto", "cpu" or "cuda" as a device of this rank. Raises ValueError for cuda without one, and for more ranks than devices."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device here; use device: cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:  # torchrun: the ranks of this machine are counted there
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if num_ranks > devices:
        raise ValueError(f"trainer.ranks={num_ranks} on {devices} CUDA devices: NCCL refuses two ranks on one device; use trainer.ranks of at most {devices}, or device: cpu")
    return torch.device("cuda", rank)


@contextmanager
def joined(place: Place, device: torch.device) -> Iterator[World]:
    """The process group while the block runs. CPU tensors always travel by gloo, so agreement needs no device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_given([str(torch.cuda.get_device_properties(device).uuid)])
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not place.rendezvous and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_TIMEOUT)
        dist.init_process_group(backend, store=fresh(agents, rank=place.rank, size=place.size, timeout=_TIMEOUT), rank=place.rank, world_size=place.size, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, init_method=init_method(place.rendezvous), rank=place.rank, world_size=place.size, timeout=_TIMEOUT)
    try:
        incarnation = torch.tensor(time.time_ns() if place.incarnation is None else place.incarnation)
        dist.broadcast(incarnation, src=0)
        mesh = init_device_mesh(device.type, (place.size,), mesh_dim_names=("shard",))
        yield World(rank=place.rank, size=place.size, device=device, mesh=mesh, incarnation=int(incarnation))
    finally:
        dist.destroy_process_group()
