"""A rank's side of FeedService, for a training thread that must never run an event loop.

    training thread ── call ──▶ loop thread (asyncio, grpc.aio) ──▶ gateway
                    ◀─ result ─

Consumes: calls of the training thread (and of its save thread). Produces: their results. Waits for: the gateway.
Unblocked by: the gateway's answer, `patience_s` without a gateway, or `stop` being set while waiting for a batch.
All calls are idempotent, so a gateway that restarts is asked again until it answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from learner.trainer.decode import Batch, checked_batch
from protos import rpc
from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2

T = TypeVar("T")
_POLL_S = 0.2
_ROWS_BYTES = 1 << 20  # rows come several to a message of about this size


class RunFailed(Exception):
    """The gateway says that the run cannot go on; its message says why."""


class Superseded(Exception):
    """A newer incarnation of the trainer is on duty."""


class Leave(Exception):
    """Told to stop while waiting for a batch, and no gateway said what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What a rank starts from. Example: Registration(run_id="r1", cut_dir="", policy_step=0, lineage=0)"""

    run_id: str
    cut_dir: str  # empty: the base weights
    policy_step: int
    lineage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What all ranks do instead of training a batch. Example: Order(save=True, leave=True): cut, then exit."""

    save: bool  # a cut of the policy step as it is
    leave: bool


class Feed:
    """Blocking calls to the gateway. Example: `feed = Feed("127.0.0.1:7430", incarnation=ns, rank=0); feed.register(world_size=2)`"""

    def __init__(self, address: str, *, incarnation: int, rank: int, patience_s: float = 120.0, leave_s: float = 60.0, security: rpc.Security = rpc.OPEN) -> None:
        """leave_s: how long a rank that was told to stop waits for the gateway's word, which may be starting again."""
        self._incarnation, self._rank, self._patience_s, self._leave_s = incarnation, rank, patience_s, leave_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="feed", daemon=True)
        self._thread.start()
        self._channel, self._stub = self._run(self._open(address, security)).result()

    async def _open(self, address: str, security: rpc.Security) -> tuple[grpc.aio.Channel, feed_pb2_grpc.FeedServiceStub]:
        channel = rpc.channel(address, security)
        return channel, feed_pb2_grpc.FeedServiceStub(channel)

    def _run(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, method: str, request: Any) -> Any:
        return self._run(self._patient(lambda: getattr(self._stub, method)(request, timeout=rpc.deadline_s(method)))).result()

    async def _patient(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's answer, asked again while there is no gateway. Raises RunFailed, Superseded, or the call's own error."""
        try:
            return await rpc.retry(call, limit_s=self._patience_s)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.ABORTED:
                raise RunFailed(error.details()) from error
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise Superseded(error.details()) from error
            raise

    def register(self, world_size: int) -> Registration:
        request = feed_pb2.RegisterRequest(incarnation=self._incarnation, rank=self._rank, world_size=world_size)
        answer = self._call("Register", request)
        return Registration(run_id=answer.run_id, cut_dir=answer.cut_dir, policy_step=answer.policy_step, lineage=answer.lineage)

    def take_batch(self, policy_step: int, *, stop: threading.Event) -> Batch | Order | None:
        """The batch of a step, or what to do instead; None when there will be no more.

        Once `stop` is set the gateway is asked to let all ranks leave. Raises Leave when no gateway answers that.
        """
        asked, told, waited_s = self._ask(policy_step, leaving=False), False, 0.0
        while True:
            try:
                return asked.result(timeout=_POLL_S)  # type: ignore[no-any-return]
            except TimeoutError:
                if asked.done():
                    raise
            if stop.is_set() and not told:
                asked.cancel()
                asked, told = self._ask(policy_step, leaving=True), True
            waited_s += _POLL_S if told else 0.0
            if waited_s > self._leave_s:
                asked.cancel()
                raise Leave(f"told to stop while waiting for the batch of step {policy_step}, and no gateway answered within {self._leave_s:.0f} s (checkpoint.leave_s): there is no cut of that step")

    def _ask(self, policy_step: int, *, leaving: bool) -> Future[Any]:
        return self._run(self._patient(lambda: self._take(policy_step, leaving=leaving)))

    async def _take(self, policy_step: int, *, leaving: bool) -> Batch | Order | None:
        request = feed_pb2.TakeBatchRequest(incarnation=self._incarnation, rank=self._rank, policy_step=policy_step, leaving=leaving, rows_bytes=_ROWS_BYTES)
        header: feed_pb2.BatchHeader | None = None
        rows: list[trajectory_pb2.Trajectory] = []
        async for message in self._stub.TakeBatch(request, timeout=rpc.deadline_s("TakeBatch")):
            if message.HasField("header"):
                header = message.header
            else:
                rows.extend([message.row] if message.HasField("row") else message.rows.rows)
        if header is None:
            raise ValueError(f"the batch of step {policy_step} came without a header")
        if header.num_rows != len(rows):
            raise ValueError(f"the batch of step {policy_step} announced {header.num_rows} rows and brought {len(rows)}")
        if header.save_first or header.leave:
            return Order(save=header.save_first, leave=header.leave)
        return None if header.end_of_run else checked_batch(header, rows, rank=self._rank)

    def close_batch(self, policy_step: int, *, snapshot_dir: str, will_save: bool, mismatch: float | None = None) -> tuple[int, int]:
        """Publishes a policy; (version, lineage). mismatch: of the step just closed, for the staleness bound; None: it stays."""
        request = feed_pb2.CloseBatchRequest(incarnation=self._incarnation, policy_step=policy_step, snapshot_dir=snapshot_dir, will_save=will_save, mismatch=mismatch)
        answer = self._call("CloseBatch", request)
        return answer.version, answer.lineage

    def save_cut(self, policy_step: int, cut_dir: str) -> str:
        """Marks finished files as a cut; where it lies then."""
        request = feed_pb2.SaveCutRequest(incarnation=self._incarnation, policy_step=policy_step, cut_dir=cut_dir)
        return str(self._call("SaveCut", request).cut_dir)

    def save_failed(self, policy_step: int, error: str) -> None:
        """Says that the announced cut of a step will not come."""
        self._call("SaveCut", feed_pb2.SaveCutRequest(incarnation=self._incarnation, policy_step=policy_step, error=error))

    def finish_run(self, error: str = "") -> None:
        self._call("FinishRun", feed_pb2.FinishRunRequest(incarnation=self._incarnation, error=error))

    def close(self) -> None:
        """Closes the channel and ends the loop thread."""
        self._run(self._channel.close()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
