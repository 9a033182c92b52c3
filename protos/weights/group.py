"""The processes of one membership of a weight transfer, outside torch's default group.

A membership is split into parts, one for each root: {root, receivers}. All parts of a process have one daemon thread that alone touches
their communicators, so no two of them are ever under way together; callers wait for it with a deadline and a
cancel flag. What outlives its deadline is abandoned together with the thread: neither `broadcast` nor `close` can hang.

                 caller                              group's thread
    connect ---> build ----------------------------> TCPStore client, all peers announced, the whole made, then part after part
    start -----> broadcast(bucket in a part) ----------------> waits for the collective, at most timeout_s (gloo), or polls (nccl)
    wait <------ result, or TransferError at the deadline; then close: abort from yet another thread
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from protos.weights import backends
from protos.weights.errors import TransferError

Transport = Literal["gloo", "nccl", "ipc"]
_POLL_S = 0.2  # how late a cancel flag is seen; results are seen at once
_ASK_S = 0.02  # between two looks for peers
_EXIT_S = 3.0  # a process that ends waits so long for groups that are being freed
_INNER = 0.95  # share of a deadline given to torch's own timeout, whose error says more than ours at the full deadline

_freeing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _let_groups_go() -> None:
    """A thread that comes back from torch while the interpreter shuts down takes the process with it (SIGABRT)."""
    end = time.monotonic() + _EXIT_S
    for thread in list(_freeing):
        thread.join(max(0.0, end - time.monotonic()))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAddress:
    """Example: GroupAddress(transport="gloo", host="10.0.0.1", port=40123, key="5-2/roots-0.1")"""

    transport: Transport
    host: str  # of the rendezvous store
    port: int
    key: str  # prefix of all keys, never used by another membership


class Pending:
    """A collective under way."""

    def __init__(self, group: TransferGroup, future: Future[None], what: str, timeout_s: float) -> None:
        self._group = group
        self._future = future
        self._what = what
        self._end = time.monotonic() + timeout_s

    def wait(self, cancelled: threading.Event | None = None) -> None:
        """Returns when the bytes are there (sender: sent). Raises TransferError at the deadline, when cancelled, or when a peer
        failed; the group is closed then."""
        self._group.await_result(self._future, self._what, self._end, cancelled)


class TransferGroup:
    """One membership's communicators. `roles[i]` says who rank i is, for messages. Made by `connect`; used by one caller at a time."""

    def __init__(self, address: GroupAddress, *, rank: int, roles: Sequence[str], device: torch.device, parts: Sequence[Sequence[int]]) -> None:
        self.address = address
        self.rank = rank
        self.roles = tuple(roles)
        self.device = device
        self._parts = [tuple(part) for part in parts]
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._whole: Any = None
        self._backends: list[Any] = []  # by part; None for a part of others
        self._store: dist.Store | None = None  # alive as long as the communicators
        self._thread = threading.Thread(target=self._run, name=f"weights-{address.key}", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        address: GroupAddress,
        *,
        rank: int,
        roles: Sequence[str],
        timeout_s: float,
        device: torch.device | None = None,
        cancelled: threading.Event | None = None,
        parts: Sequence[Sequence[int]] = (),
    ) -> TransferGroup:
        """Joins as `rank` of len(roles). `parts`: ranks of each, its root first, the same for everybody; none: all are one part. Raises
        TransferError naming the peers that did not appear within timeout_s."""
        group = cls(address, rank=rank, roles=roles, device=device or torch.device("cpu"), parts=parts or [range(len(roles))])
        now = time.monotonic()
        building = group._submit(lambda: group._build(now + _INNER * timeout_s))
        group.await_result(building, "connecting", now + timeout_s, cancelled)
        return group

    def start(self, tensor: torch.Tensor, *, what: str, timeout_s: float, part: int = 0) -> Pending:
        """Begins to broadcast a contiguous uint8 tensor from the root of a part. Keep the tensor untouched until `wait` returned; after
        a TransferError never use it again (an abandoned collective may still write into it)."""
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous(), "a bucket is a contiguous uint8 tensor"
        future = self._submit(lambda: backends.broadcast(self._backends[part], tensor, _INNER * timeout_s, self._closed))
        return Pending(self, future, what, timeout_s)

    def broadcast(self, tensor: torch.Tensor, *, what: str, timeout_s: float, part: int = 0, cancelled: threading.Event | None = None) -> None:
        """`start` and `wait`."""
        self.start(tensor, what=what, timeout_s=timeout_s, part=part).wait(cancelled)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Gives the communicators up; returns at once. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._tasks.put(None)
        abort = threading.Thread(target=self._abort, name=f"weights-abort-{self.address.key}", daemon=True)
        _freeing.update((self._thread, abort))
        abort.start()

    def await_result(self, future: Future[Any], what: str, end: float, cancelled: threading.Event | None) -> Any:
        """Result of a task, or TransferError at `end` (time.monotonic), when cancelled or when the task failed."""
        while True:
            try:
                return future.result(timeout=max(0.0, min(_POLL_S, end - time.monotonic())))
            except FutureTimeout:
                if cancelled is not None and cancelled.is_set():
                    raise self._failure(what, "cancelled") from None
                if time.monotonic() >= end and not future.done():
                    raise self._failure(what, "no result by the deadline") from None
            except TransferError:
                self.close()
                raise
            except Exception as error:  # the backends raise RuntimeError, DistError and kin; each means the same here
                raise self._failure(what, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def _failure(self, what: str, cause: str) -> TransferError:
        self.close()
        peers = ", ".join(role for rank, role in enumerate(self.roles) if rank != self.rank)
        return TransferError(
            f"{self.address.transport} group {self.address.key}, {what}: {cause}; this is rank {self.rank} ({self.roles[self.rank]}), its peers are {peers}; "
            "the group is given up, the next epoch makes a new one"
        )

    def _submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self._closed.is_set():
            future.set_exception(TransferError(f"group {self.address.key} is closed"))
        else:
            self._tasks.put((task, future))
        return future

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                future.set_result(task())
            except Exception as error:  # handed to the waiting caller
                future.set_exception(error)
            del task, future, item  # the bucket must not live until the next one

    def _build(self, end: float) -> None:
        """On the group's thread."""
        try:
            self._connect(end)
        except BaseException:
            self._abort()  # what was made before the others failed to come
            raise
        if self._closed.is_set():
            self._abort()  # what was made while the group was given up, which `close` did not see

    def _connect(self, end: float) -> None:

        def remaining() -> timedelta:
            return timedelta(seconds=max(0.001, end - time.monotonic()))

        address = self.address
        store = dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=remaining())
        self._store = dist.PrefixStore(address.key, store)
        self._await_everybody("here", "did not appear in time", end)
        wire = backends.WIRES[address.transport](address.host, address.port, self.device)
        self._whole = wire.whole(dist.PrefixStore("whole", self._store), self.rank, len(self.roles), remaining())
        if self._whole is not None:
            self._await_everybody("joined", "announced itself and did not join in time", end)
            if self._parts == [tuple(range(len(self.roles)))]:
                self._backends = [self._whole]
                return
        for number, members in enumerate(self._parts):
            made = wire.part(self._whole, dist.PrefixStore(f"part-{number}", self._store), self.rank, members, remaining())
            self._backends.append(made)  # looked up now: a group that was given up meanwhile has another list

    def _await_everybody(self, stage: str, complaint: str, end: float) -> None:
        """Asks instead of blocking in the store: a thread that is given up must end, since one that sits in torch while the
        interpreter shuts down takes the process with it."""
        store = self._store
        if store is None:
            raise TransferError(f"group {self.address.key} is closed")
        store.set(f"{stage}/{self.rank}", "1")
        while missing := [role for rank, role in enumerate(self.roles) if not store.check([f"{stage}/{rank}"])]:
            if self._closed.is_set() or time.monotonic() >= end:
                raise TransferError(
                    f"{self.address.transport} group {self.address.key}, connecting: {', '.join(missing)} {complaint}; this is rank {self.rank} ({self.roles[self.rank]})"
                )
            time.sleep(_ASK_S)

    def _abort(self) -> None:
        """On its own thread: an abort may itself block."""
        made = self._backends if self._whole in self._backends else [*self._backends, self._whole]
        self._backends, self._whole, self._store = [], None, None
        for backend in made:
            if backend is not None:
                backends.abort(backend)
