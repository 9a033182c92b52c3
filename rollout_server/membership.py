"""Membership in a learner's run: one Attend stream for as long as it holds, and another one when it breaks.

    attend    consumes orders, produces calls on driver and actor's end,  waits for the learner,   unblocked by its orders
    _beat     consumes the replica's load, produces heartbeats,           waits for the clock
    _report   consumes the driver's reports, produces messages,           waits for the driver
    _until_finished                                                      waits for the end of the run, then for its last version

A refusal is final. A learner that is away is waited for, and said to be away once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from protos import rpc, stacks
from protos.gpus import Gpu
from protos.learner.v1alpha1 import learner_pb2 as pb
from rollout_server.production import Who
from rollout_server.replica import Replica
from rollout_server.weights.driver import UpdateDriver
from rollout_server.weights.fetching import Source

logger = logging.getLogger("headrace.rollout.membership")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_LAST_VERSION_S = 25.0  # for the last version to be loaded once the run is over; the gateway stays a little longer
_DIAGNOSIS_BYTES = 1 << 20  # of the stacks of all processes together; a message may be larger, a heartbeat waits behind it
_FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class RefusedError(ValueError):
    """The learner will not have this replica; its message says why."""


class Left(Exception):
    """The learner let this replica go in good order. Example: `Left("the run is over: 20 steps")`."""

    def __init__(self, reason: str, *, finished: bool) -> None:
        super().__init__(reason)
        self.finished = finished  # the run is over, rather than this replica drained


class Membership:
    """`hello()` makes the greeting for the engine's present life; `welcomed` is called with each Welcome; `drain(grace_s)`
    finishes what is in hand."""

    def __init__(
        self,
        *,
        stub: Any,
        address: str,
        replica: Replica,
        hello: Callable[[], pb.Hello],
        welcomed: Callable[[pb.Welcome], None],
        drain: Callable[[float], Awaitable[None]],
        source: Source,
        keep_mirror: bool = False,
        gpus: Callable[[], Sequence[Gpu]] = tuple,
    ) -> None:
        self._stub = stub
        self._address = address
        self._replica = replica
        self._hello = hello
        self._welcomed = welcomed
        self._drain = drain
        self._source = source
        self._keep_mirror = keep_mirror
        self._gpus = gpus
        self._run_id = ""  # learned from the first Welcome; from then on no other run will do
        self._who: Who | None = None
        self._said_away = False
        self._leaving = asyncio.Event()
        self._finished: asyncio.Future[str] | None = None  # why the run is over; one for each session
        self._driver_task: asyncio.Task[None] | None = None
        self._diagnosing: asyncio.Task[None] | None = None
        self._driver_life = 0

    def who(self) -> Who | None:
        """As whom the replica attends now; None while it does not."""
        return self._who

    async def attend(self) -> None:
        """Until the learner lets the replica go (raises Left), refuses it (RefusedError), or leave() was called (returns)."""
        wait_s = _FIRST_WAIT_S
        try:
            while not self._leaving.is_set():
                try:
                    await self._session()
                    wait_s = _FIRST_WAIT_S
                except grpc.aio.AioRpcError as error:
                    self._away(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        finally:
            self._stop_driver()

    def leave(self) -> None:
        """Says goodbye on the stream and ends attend()."""
        self._leaving.set()

    def _away(self, error: grpc.aio.AioRpcError) -> None:
        """Raises RefusedError for what time does not heal."""
        if error.code() in _FINAL:
            raise RefusedError(f"the learner at {self._address} refused this replica ({error.code().name}): {error.details()}") from None
        if not self._said_away:
            logger.warning("the learner at %s is not there (%s), waiting for it", self._address, error.code().name)
            self._said_away = True

    async def _session(self) -> None:
        """One stream, from hello to its end."""
        driver = self._driver()
        hello = self._hello()
        hello.run_id = hello.run_id or self._run_id
        call = self._stub.Attend(timeout=rpc.deadline_s("Attend"))
        writing = asyncio.Lock()
        self._finished = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None]] = []
        try:
            await call.write(pb.AttendRequest(hello=hello))
            welcome = await self._welcome(call)
            self._enter(welcome, hello, driver)
            tasks = [
                asyncio.create_task(self._beat(call, writing, welcome.heartbeat_s)),
                asyncio.create_task(self._report(call, writing, driver)),
                asyncio.create_task(self._orders(call, writing, driver)),
                asyncio.create_task(self._until_leaving(call, writing)),
                asyncio.create_task(self._until_finished(self._finished, driver)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.InvalidStateError:  # a write on a stream that has ended: its status says why
            raise await _status(call) from None
        finally:
            self._who = None
            driver.detached()
            for task in tasks:
                task.cancel()
            call.cancel()

    async def _welcome(self, call: Any) -> pb.Welcome:
        first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "welcome":
            raise RefusedError(f"what listens at {self._address} answered Hello without a Welcome; is it a learner?")
        welcome: pb.Welcome = first.welcome
        return welcome

    def _enter(self, welcome: pb.Welcome, hello: pb.Hello, driver: UpdateDriver) -> None:
        logger.info("attends run %s at %s, newest version %d", welcome.run_id, self._address, welcome.newest_version)
        self._said_away = False
        self._run_id = welcome.run_id
        self._welcomed(welcome)
        driver.welcome(welcome.newest_version, welcome.push_deadline_s)
        self._who = Who(replica_id=hello.replica_id, incarnation=hello.incarnation, run_id=welcome.run_id)

    # --- the loops of a session; the first that ends ends it

    async def _beat(self, call: Any, writing: asyncio.Lock, heartbeat_s: float) -> None:
        """Ends when the engine has come up anew: it must be greeted anew."""
        life = self._replica.life
        while self._replica.life == life:
            async with writing:
                await call.write(pb.AttendRequest(heartbeat=self._heartbeat()))
            await asyncio.sleep(heartbeat_s)

    def _heartbeat(self) -> pb.Heartbeat:
        replica, stats = self._replica, self._replica.engine.stats()
        return pb.Heartbeat(
            state=replica.state, loaded_version=replica.engine.loaded_version, num_running=stats.num_running,
            num_free=max(0, replica.limit - stats.num_running),
            num_tokens=stats.num_tokens, idle_s=stats.idle_s, num_drawn=stats.num_tokens if stats.num_drawn is None else stats.num_drawn,
            num_scoring=replica.tally.scoring.num_now, drawing_s=replica.tally.drawing.seconds, scoring_s=replica.tally.scoring.seconds,
            num_scored=replica.tally.num_scored, num_unscored=replica.tally.num_unscored, gpus=[_gpu(gpu) for gpu in self._gpus()],
        )  # fmt: skip

    async def _report(self, call: Any, writing: asyncio.Lock, driver: UpdateDriver) -> None:
        while True:
            report = await driver.next_report()
            async with writing:
                await call.write(pb.AttendRequest(update_report=report))
                await call.write(pb.AttendRequest(heartbeat=self._heartbeat()))  # what is loaded now, at once

    async def _orders(self, call: Any, writing: asyncio.Lock, driver: UpdateDriver) -> None:
        while (order := await call.read()) is not grpc.aio.EOF:
            match order.WhichOneof("message"):
                case "drain":
                    await self._drain(order.drain.grace_s)
                    await self._say_goodbye(call, writing)
                    raise Left("drained by the learner", finished=False)
                case "diagnose":
                    if self._diagnosing is None or self._diagnosing.done():
                        self._diagnosing = asyncio.create_task(self._diagnose(call, writing, order.diagnose.number))
                case "run_finished":
                    assert self._finished is not None
                    if not self._finished.done():
                        self._finished.set_result(order.run_finished.reason)
                case _:
                    driver.order(order)

    async def _diagnose(self, call: Any, writing: asyncio.Lock, number: int) -> None:
        """Asks every process of this replica what it is doing, in a thread, and sends what they said; a stream that ended meanwhile wants nothing."""
        asked = await asyncio.to_thread(stacks.ask, stacks.family(os.getpid()))
        each = _DIAGNOSIS_BYTES // max(1, len(asked))
        answer = pb.Diagnosis(number=number, machine=stacks.machine(), processes=[pb.Diagnosis.Process(name=one.name, pid=one.pid, text=one.text[:each]) for one in asked])
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with writing:
                await call.write(pb.AttendRequest(diagnosis=answer))

    async def _until_finished(self, finished: asyncio.Future[str], driver: UpdateDriver) -> None:
        """The last version is loaded before the replica leaves, since a commit must not be cut in two and whoever goes on asking
        this replica means the final policy. Transfers go on meanwhile: the orders are still read."""
        reason = await finished
        with suppress(TimeoutError):
            await asyncio.wait_for(driver.current(), _LAST_VERSION_S)
        self._run_id = ""
        raise Left(f"the run is over: {reason}", finished=True)

    async def _until_leaving(self, call: Any, writing: asyncio.Lock) -> None:
        await self._leaving.wait()
        await self._say_goodbye(call, writing)

    async def _say_goodbye(self, call: Any, writing: asyncio.Lock) -> None:
        """Returns once the learner has ended the stream on it, or did not within two seconds."""
        async with writing:
            await call.write(pb.AttendRequest(goodbye=pb.Goodbye()))
            await call.done_writing()
        with suppress(TimeoutError):
            await asyncio.wait_for(call.code(), 2.0)

    # --- the driver, one for each life of the engine

    def _driver(self) -> UpdateDriver:
        if self._replica.driver is None or self._driver_life != self._replica.life:
            self._stop_driver()
            self._replica.driver = UpdateDriver(self._replica.engine, source=self._source, keep_mirror=self._keep_mirror, committed=self._replica.tally.updated)
            self._driver_task = asyncio.create_task(self._replica.driver.run())
            self._driver_life = self._replica.life
        return self._replica.driver

    def _stop_driver(self) -> None:
        if self._driver_task is not None:
            self._driver_task.cancel()
            self._driver_task = None


def _gpu(gpu: Gpu) -> pb.Gpu:
    return pb.Gpu(index=gpu.index, uuid=gpu.uuid, use=gpu.use, used_bytes=gpu.memory_used_bytes, size_bytes=gpu.memory_bytes, power_w=gpu.power_w)


async def _status(call: Any) -> grpc.aio.AioRpcError:
    """How an ended call ended."""
    metadata = (await call.initial_metadata(), await call.trailing_metadata())
    return grpc.aio.AioRpcError(await call.code(), *metadata, details=await call.details())
