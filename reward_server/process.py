"""The service's handle on one scorer process: spawned, spoken to over a socket pair, killed with all its children."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from reward_server import channel
from reward_server.accounts import Told
from reward_server.lanes import Item

log = logging.getLogger("headrace.reward_server.process")

_LOOK_S = 0.01
_OUTPUT_PAUSE_S = 0.05
_OUTPUT_LINES = 10


class ScorerProcess(asyncio.Protocol):
    """One process and the batch it is working on.

    `on_message` gets each answer once it is ready; `on_gone` is called once when its end of the socket closes.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        on_message: Callable[[ScorerProcess, list[Any]], None],
        on_gone: Callable[[ScorerProcess], None],
    ) -> None:
        self._environment = environment  # without credentials
        self.unanswered: dict[int, Item] = {}  # by seq, in the order they were sent
        self.scorer = -1  # of the batch; -1: none yet
        self.batch_items = 0
        self.batch_at_s = 0.0  # loop time when the batch was sent
        self.call_at_s = 0.0  # loop time when the running call began
        self.beat_at_s = 0.0  # loop time of the last sign of life
        self.is_slow = False
        self.elsewhere: set[int] = set()  # seqs that it still holds, cancelled, and that others work on
        self.is_ready = False  # its scorers are loaded
        self.is_dead = False
        self._on_message = on_message
        self._on_gone = on_gone
        self._answers = channel.answers()
        self._first: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._line: asyncio.Transport | None = None
        self._output: asyncio.BaseTransport | None = None
        self._child: subprocess.Popen[bytes] | None = None

    async def start(self, hello: bytes, folder: Path, limit_s: float) -> list[Told]:
        """Spawns it and waits until its scorers are loaded: what it says of each.

        Raises ValueError when a scorer cannot be loaded, ChildProcessError when the process ends or takes too long.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        with theirs:
            self._child = _spawn(theirs, write_end, folder, self._environment)
        os.close(write_end)
        self._output, _ = await loop.connect_read_pipe(lambda: _Output(self.pid), os.fdopen(read_end, "rb", 0))
        self._line, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        self._line.write(hello)
        try:
            _, is_ready, said = await asyncio.wait_for(asyncio.shield(self._first), limit_s)
        except TimeoutError:
            raise ChildProcessError(f"the scorers were not loaded within load_limit_s={limit_s:g}; raise it, or look at what their modules do at import") from None
        if not is_ready:
            raise ValueError(said)
        return [Told(description=description, is_async=is_async, version=version, is_deterministic=same) for description, is_async, version, same in said]

    @property
    def pid(self) -> int:
        """Process id, which is its process group's, too."""
        assert self._child is not None, "not started"
        return self._child.pid

    def run(self, scorer: int, batch: list[Item]) -> None:
        """Sends a batch. The process must be idle."""
        assert not self.unanswered and not self.elsewhere, "not idle"
        now_s = asyncio.get_running_loop().time()
        self.scorer, self.batch_items = scorer, len(batch)
        self.batch_at_s = self.call_at_s = self.beat_at_s = now_s
        self.add(batch)

    def add(self, batch: list[Item]) -> None:
        """Sends calls of the same async scorer to a process that has some, too."""
        assert self._line is not None and not self.is_dead, "not ready"
        now_s = asyncio.get_running_loop().time()
        for item in batch:
            item.sent_at_s = now_s
            self.unanswered[item.seq] = item
        self._line.write(channel.encode([self.scorer, [[item.seq, item.prompt, item.completion, item.fields] for item in batch]]))

    def cancel(self, seqs: list[int]) -> None:
        """Asks it not to make calls it holds, or (async) to end them; each is still answered."""
        if self._line is not None and not self.is_dead and seqs:
            self._line.write(channel.encode([channel.CANCEL, seqs]))

    def data_received(self, data: bytes) -> None:
        """Hands on answers. Bytes that are no messages mean that user code wrote to our socket: the process is killed."""
        try:
            self._answers.feed(data)
            for message in self._answers:
                if self._first.done():
                    self._on_message(self, message)
                else:
                    self._first.set_result(message)
        except (ValueError, TypeError, LookupError) as error:
            log.warning("scorer process %d sent what is no answer, and is killed: %r", self.pid, error)
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._first.done():
            self._first.set_exception(ChildProcessError("the process ended while it loaded the scorers"))
            self._first.exception()  # retrieved: nobody may be waiting any more
        self._on_gone(self)

    def kill(self) -> None:
        """SIGKILL to the process and its children."""
        if self._child is not None and self._child.returncode is None:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and nothing is left of its group

    async def end(self, wait_s: float = 0.0) -> str:
        """Waits up to wait_s for its own end, kills what is left, reaps it. Returns words for how it ended."""
        if self._child is None:
            return "it was never started"
        by_itself = await self._ended(wait_s)
        self.kill()
        await self._ended(float("inf"))
        code = self._child.wait()
        for transport in (self._line, self._output):
            if transport is not None:
                transport.close()
        return _how_it_ended(code) if by_itself else "it was killed"

    async def _ended(self, wait_s: float) -> bool:
        """Whether it ends within wait_s. Leaves it unreaped, so that its process group keeps its id."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while not self._has_ended():
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def _has_ended(self) -> bool:
        assert self._child is not None, "not started"
        return self._child.returncode is not None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _spawn(line: socket.socket, output: int, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter in the given folder: nothing is forked, so no lock or thread of ours is copied."""
    packages = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), packages]))
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "reward_server.worker", str(line.fileno()), str(os.getpid())],
        pass_fds=(line.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**environment, "PYTHONPATH": path},
        start_new_session=True,
    )


def _how_it_ended(code: int) -> str:
    names = {each.value: each.name for each in signal.Signals}
    return f"its process ended with exit code {code}" if code >= 0 else f"its process was ended by {names.get(-code, f'signal {-code}')}"


class _Output(asyncio.Protocol):
    """Logs some of what a process prints. Reads no faster than _OUTPUT_LINES every _OUTPUT_PAUSE_S: endless output waits."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.ReadTransport, transport)  # that of connect_read_pipe

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n", _OUTPUT_LINES)
        for line in [*lines, rest[:500]] if len(lines) < _OUTPUT_LINES else lines:
            if line:
                log.info("scorer process %d prints: %s", self._pid, line[:500].decode(errors="replace"))
        if len(lines) == _OUTPUT_LINES and rest:
            log.info("scorer process %d prints: and %d more bytes", self._pid, len(rest))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(_OUTPUT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
