"""gloo, NCCL and CUDA IPC groups made directly, so that their failures are errors here and never the process's end.

NCCL: torch reads its failure handling from the environment once, in the constructor of each group, so `NcclWire` sets it
around that one constructor and puts back what was there: the trainer's default group keeps its own. For the push group:
no handling by the watchdog (TORCH_NCCL_ASYNC_ERROR_HANDLING=0), no heartbeat monitor, and a timeout that is never
reached, since the watchdog's reaction to a timeout or a dead peer is not confined to its group: it raises a process-wide
dump signal on which the *default* group's monitor ends the process. `tolerate_push_failures` turns that one signal off
and must be called before the default NCCL group is made; the default group's own watchdog goes on as before.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from protos.weights.ipc import IpcGroup

_LOCK = threading.Lock()
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
_NEVER = timedelta(days=30)


def tolerate_push_failures() -> None:
    """Call before `init_process_group("nccl")` in a process that pushes or receives weights by NCCL: a failure in the push
    group then cannot make the default group's monitor end the process. Its own failures still do."""
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


class Wire(Protocol):
    """One transport's way to make a membership's communicators. All calls come from the one thread that will use them."""

    def whole(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """What parts are split from; None where a part needs nothing but the store. May return before the others have come: they are
        waited for in the store, with a deadline, before anything is split."""

    def part(self, whole: Any, store: dist.Store, rank: int, members: Sequence[int], timeout: timedelta) -> Any:
        """The communicator of `members` (ranks of the whole, the root first); None for who is not among them. Everybody calls it for every
        part in the same order. Raises RuntimeError at the timeout."""


class GlooWire:
    """Host memory. A part is a group of its own in the store."""

    def __init__(self, host: str, port: int, device: torch.device) -> None:
        assert device.type == "cpu", "gloo moves host memory"
        self._host, self._port = host, port

    def whole(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return None

    def part(self, whole: Any, store: dist.Store, rank: int, members: Sequence[int], timeout: timedelta) -> Any:
        """Listens on the interface by which this machine reaches the store."""
        if rank not in members:
            return None
        # Its stub lacks the options. The constructor without them picks the interface of the host name.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(self._host, self._port))]
        return dist.ProcessGroupGloo(store, members.index(rank), len(members), options)


class IpcWire:
    """Learner and replica on one GPU (protos/weights/ipc.py). Raises RuntimeError naming the rule where this process cannot take part."""

    def __init__(self, host: str, port: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"transport ipc passes memory of GPUs, and this process works on a {device.type}; set push.transport to gloo or auto")
        self._device = device
        if device.index is not None:
            torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))

    def whole(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return None

    def part(self, whole: Any, store: dist.Store, rank: int, members: Sequence[int], timeout: timedelta) -> Any:
        return IpcGroup(store, members.index(rank), len(members), self._device) if rank in members else None


class NcclWire:
    """Device memory. Parts are split from one communicator of everybody, so that NCCL meets once a membership. Neither is waited for inside
    NCCL (blocking=0): a peer that never comes leaves no thread behind, and its communicator can be aborted."""

    def __init__(self, host: str, port: int, device: torch.device) -> None:
        assert device.type == "cuda", "nccl moves device memory"
        self._device = device
        torch.cuda.set_device(device)
        # Collectives wait for the calling thread's stream: a stream of its own keeps them from waiting for training.
        torch.cuda.set_stream(torch.cuda.Stream(device))

    def whole(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return self._made(store, rank, size, _nccl_options())

    def part(self, whole: Any, store: dist.Store, rank: int, members: Sequence[int], timeout: timedelta) -> Any:
        if rank not in members:
            whole.perform_nocolor_split(self._device)
            return None
        options = _nccl_options()
        options.split_from, options.split_color = whole, 1
        return self._made(store, members.index(rank), len(members), options)

    def _made(self, store: dist.Store, rank: int, size: int, options: Any) -> Any:
        with _quiet_constructor():
            made = dist.ProcessGroupNCCL(store, rank, size, options)
        made.eager_connect_single_device(self._device)
        return made


def _nccl_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    options.config.blocking = 0
    return options


@contextmanager
def _quiet_constructor() -> Iterator[None]:
    """torch reads these in the constructor of a group; others of this process keep what they had."""
    with _LOCK:
        before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
        os.environ.update(_NCCL_ENVIRONMENT)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


WIRES: dict[str, Callable[[str, int, torch.device], Wire]] = {"gloo": GlooWire, "nccl": NcclWire, "ipc": IpcWire}


def broadcast(backend: Any, tensor: torch.Tensor, timeout_s: float, abandoned: threading.Event) -> None:
    """From rank 0 of a part. Blocks until done. gloo: raises RuntimeError by itself at the timeout. NCCL: until `abandoned` is set at the latest."""
    if isinstance(backend, IpcGroup):
        backend.broadcast(tensor, timeout_s, abandoned)
        return
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    if tensor.device.type == "cpu":
        options.timeout = timedelta(seconds=timeout_s)
        backend.broadcast([tensor], options).wait()
        return
    work = backend.broadcast([tensor], options)
    pause_s = 0.0001
    while not work.is_completed():
        if abandoned.is_set():
            raise RuntimeError("abandoned")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.002)
    # Raises what failed: of the forms of wait only the one with a timeout does, and `exception()` has no Python form in 2.11.
    work.wait(timedelta(seconds=1))
    torch.cuda.current_stream(tensor.device).synchronize()


def abort(backend: Any) -> None:
    """Ends what runs (NCCL) and frees the group; may block, so never call it on a thread that somebody waits for."""
    if isinstance(backend, dist.ProcessGroupGloo):
        return  # dropping the last reference joins its threads, which end at their collective's own timeout
    if isinstance(backend, IpcGroup):
        backend.close()
        return
    backend.abort()


def _local_address(host: str, port: int) -> str:
    """This machine's address on the way to host:port. Raises OSError for a host that does not resolve."""
    family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
