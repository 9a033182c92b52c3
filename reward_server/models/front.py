"""Calls from everywhere, batched for whichever replica is free.

      score ──▶ waiting ──▶ _serve, one for each replica ──▶ its processes ──▶ answers ──▶ score returns
                   ▲                     │
                   └── put back once: calls that a replica died with

A replica takes what waits the moment it is free, up to `batch_items`: batches grow with the load, and nobody waits for company.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass

import msgpack

from reward_server.models.spec import ModelSpec

log = logging.getLogger("headrace.reward_server.models")

_READ_BYTES = 1 << 18
_REST_S, _LONGEST_REST_S = 0.5, 10.0
MAX_BATCH_CHARS = 8 << 20  # of text sent to a replica at once, beyond its first item


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    prompt: str
    completion: str
    answer: asyncio.Future[float | str]
    was_tried: bool = False


class Replica:
    """The processes of one replica: one, or one a device with tensor parallelism."""

    def __init__(self, spec: ModelSpec, devices: tuple[str, ...]) -> None:
        self._spec = spec
        self.devices = devices
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[socket.socket] = []

    def start(self) -> None:
        """Blocks until its model is loaded. Raises ValueError in one line when it cannot be."""
        self.spawn()
        self.wait()

    def spawn(self) -> None:
        """Starts its processes, which load the model."""
        port = _free_port() if len(self.devices) > 1 else 0
        for rank, device in enumerate(self.devices):
            ours, theirs = socket.socketpair()
            with theirs:
                self._processes.append(_spawn(theirs, self.devices, rank, port))
            self._lines.append(ours)
            inner = f"{device.partition(':')[0]}:{rank}" if port and device != "cpu" else device  # its devices are all that these processes see
            ours.sendall(msgpack.packb([self._spec.packed(), inner]))

    def wait(self) -> None:
        """Blocks until every process has loaded the model. The first that cannot ends all: ranks wait for each other without end."""
        waiting = list(self._lines)
        while waiting:
            for line in select.select(waiting, [], [])[0]:
                waiting.remove(line)
                is_ready, words = _first(line)
                if not is_ready:
                    self.stop()
                    raise ValueError(words)
                line.setblocking(False)

    async def answers(self, items: list[tuple[str, str]], limit_s: float) -> list[float | str]:
        """Raises ConnectionError when it dies, TimeoutError when it takes longer."""
        loop = asyncio.get_running_loop()
        data = msgpack.packb(items)
        async with asyncio.timeout(limit_s):
            for line in self._lines:
                await loop.sock_sendall(line, data)
            unpacker = msgpack.Unpacker(max_buffer_size=0)
            while received := await loop.sock_recv(self._lines[0], _READ_BYTES):
                unpacker.feed(received)
                for answers in unpacker:
                    return list(answers)
        raise ConnectionError("its process ended")

    def stop(self) -> None:
        """Kills and reaps its processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for line in self._lines:
            line.close()
        self._processes, self._lines = [], []


class Front:
    """Example: `front = Front(spec, batch_limit_s=120); front.start(); value = await front.score("1 + 1?", "2")`"""

    def __init__(self, spec: ModelSpec, *, batch_limit_s: float) -> None:
        self._spec = spec
        self._batch_limit_s = batch_limit_s
        self._replicas = [Replica(spec, devices) for devices in spec.replicas()]
        self._waiting: deque[_Call] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Blocks until every replica has loaded its model. Raises ValueError in one line when one cannot."""
        began_s = time.monotonic()
        for replica in self._replicas:
            replica.spawn()
        try:
            for replica in self._replicas:
                replica.wait()
        except ValueError:
            for replica in self._replicas:
                replica.stop()
            raise
        log.info("%s is loaded on %d replicas after %.1f s", self._spec.model, len(self._replicas), time.monotonic() - began_s)

    async def score(self, prompt: str, completion: str) -> float | str:
        """The score, or the words for why there is none."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._serve(replica)) for replica in self._replicas]
        call = _Call(prompt=prompt, completion=completion, answer=asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrived.set()
        return await call.answer

    async def stop(self) -> None:
        """Ends every replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self._replicas:
            replica.stop()

    async def _serve(self, replica: Replica) -> None:
        """One replica's loop, until cancelled. A replica that dies or hangs is replaced."""
        while True:
            batch = await self._batch()
            try:
                answers = await replica.answers([(call.prompt, call.completion) for call in batch], self._batch_limit_s)
                assert len(answers) == len(batch), f"{len(answers)} answers to {len(batch)} items"
            except (OSError, TimeoutError, AssertionError, ValueError) as error:
                log.warning("a replica of %s on %s failed and is started again: %r", self._spec.model, ", ".join(replica.devices), error)
                self._put_back(batch, f"a replica failed at it twice: {type(error).__name__} {error}")
                await self._restart(replica)
                continue
            for call, answer in zip(batch, answers, strict=True):
                if not call.answer.done():
                    call.answer.set_result(answer)

    async def _batch(self) -> list[_Call]:
        """What waits, up to a batch; calls that nobody waits for any more are left out."""
        while True:
            batch: list[_Call] = []
            num_chars = 0
            while self._waiting and len(batch) < self._spec.batch_items and num_chars <= MAX_BATCH_CHARS:
                call = self._waiting.popleft()
                if call.answer.done():
                    continue
                if call.was_tried and batch:  # it may be what a replica died of: alone, so that no other is blamed
                    self._waiting.appendleft(call)
                    break
                batch.append(call)
                num_chars += len(call.prompt) + len(call.completion)
                if call.was_tried:
                    break
            if batch:
                return batch
            self._arrived.clear()
            await self._arrived.wait()

    def _put_back(self, batch: list[_Call], words: str) -> None:
        for call in reversed(batch):
            if call.was_tried and not call.answer.done():
                call.answer.set_result(words)
            call.was_tried = True
            if not call.answer.done():
                self._waiting.appendleft(call)
        self._arrived.set()

    async def _restart(self, replica: Replica) -> None:
        """Until it is loaded again."""
        rest_s = 0.0
        while True:
            await asyncio.sleep(rest_s)
            replica.stop()
            with contextlib.suppress(ValueError, OSError):
                await asyncio.to_thread(replica.start)
                return
            rest_s = min(_LONGEST_REST_S, 2 * rest_s + _REST_S)


def _spawn(line: socket.socket, devices: tuple[str, ...], rank: int, port: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter. With several ranks it is told how to meet the others, and sees their devices only."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if port:
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(devices)))
        if devices[0].startswith("cuda"):
            env["CUDA_VISIBLE_DEVICES"] = _visible(devices, env.get("CUDA_VISIBLE_DEVICES", ""))
    return subprocess.Popen([sys.executable, "-m", "reward_server.models.replica", str(line.fileno())], pass_fds=(line.fileno(),), stdin=subprocess.DEVNULL, env=env)


def _visible(devices: tuple[str, ...], already: str) -> str:
    """CUDA_VISIBLE_DEVICES for some of the devices that are visible here."""
    indices = [int(device.partition(":")[2]) for device in devices]
    names = already.split(",") if already else []
    return ",".join(names[index] if index < len(names) else str(index) for index in indices)


def _first(line: socket.socket) -> tuple[bool, str]:
    """A replica's first message; blocks."""
    unpacker = msgpack.Unpacker()
    with contextlib.suppress(OSError):
        while data := line.recv(_READ_BYTES):
            unpacker.feed(data)
            for is_ready, words in unpacker:
                return is_ready, words
    return False, "the process of a replica ended while it loaded the model; what it printed stands in the log above"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])
