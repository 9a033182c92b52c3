"""An environment process: `python -m rollout_server.environments.worker FD PARENT`. Users' environments and agents run only here.

It reads calls from the socket FD and answers each when it is done. Calls of different sessions run side by side as far as the code is
asynchronous; a plain function holds up the whole process, which the rollout server kills when that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack

from protos.lifeline import die_with_parent
from protos.mistakes import names_in, one_line
from rollout_server.environments import wire
from rollout_server.environments.interface import checked_observation, checked_reward, checked_step

_BUILT_IN = {"calculator": "rollout_server.environments.calculator:Calculator", "tower_of_hanoi": "rollout_server.environments.tower_of_hanoi:TowerOfHanoi"}
_READ_BYTES = 1 << 18


def load(use: str) -> Any:
    """The class or function that `use` names. Raises ValueError in one line."""
    module, _, name = _BUILT_IN.get(use, use).partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(f"module {module!r} was not found; start in the folder that holds it, or put that folder on PYTHONPATH") from None
        raise ValueError(f"module {module!r} imports {error.name!r}, which is not installed") from None
    except BaseException as error:  # a module of a user's may raise what it likes
        raise ValueError(f"module {module!r} cannot be imported: {type(error).__name__}: {one_line(error)}") from None
    if not hasattr(found, name):
        raise ValueError(f"module {module!r} has no {name!r}; it has {names_in(found) or 'no class'}")
    return getattr(found, name)


def held() -> list[int]:
    """Descriptors, threads and children of this process."""
    children = Path("/proc/self/task")
    count = sum(len((task / "children").read_text().split()) for task in children.iterdir() if (task / "children").exists())
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), count]


class Worker:
    """The sessions of one process."""

    def __init__(self, connection: socket.socket, make: Callable[[], Any], agent: Callable[..., Any] | None) -> None:
        self._connection = connection
        self._make = make
        self._agent = agent
        self._sessions: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, call: list[Any]) -> None:
        """Answers a call, later if it takes its time."""
        task = asyncio.get_running_loop().create_task(self._answer(*call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, session: int, *arguments: Any) -> None:
        try:
            answer: list[Any] = [number, None, await getattr(self, f"_{method}")(session, *arguments)]
        except _BadAnswer as error:
            answer = [number, "bad_answer", one_line(error)]
        except BaseException as error:  # the supervised edge: whatever an environment raises is its session's failure
            answer = [number, "error", _words(error)]
        self._connection.sendall(msgpack.packb(answer))

    async def _reset(self, session: int, task: list[Any]) -> Any:
        environment = self._sessions[session] = self._make()
        return _checked(checked_observation, await _awaited(environment.reset(wire.task_in(task))))

    async def _step(self, session: int, action: list[Any]) -> Any:
        return wire.step_out(_checked(checked_step, await _awaited(self._sessions[session].step(wire.action_in(action)))))

    async def _run(self, session: int, task: list[Any], base_url: str, api_key: str) -> Any:
        """An agent's whole sample, in a thread of its own, so that agents may share a process."""
        agent = self._agent
        assert agent is not None
        given = {"task": wire.task_in(task), "base_url": base_url, "api_key": api_key}
        with ThreadPoolExecutor(max_workers=1) as thread:
            said = await _awaited(await asyncio.get_running_loop().run_in_executor(thread, lambda: agent(**given)))
        return None if said is None else _checked(checked_reward, said)

    async def _close(self, session: int) -> list[int]:
        environment = self._sessions.pop(session, None)
        close = getattr(environment, "close", None)
        if close is not None:
            await _awaited(close())
        del environment
        gc.collect()  # what only waits to be collected was not left behind
        return held()


class _BadAnswer(Exception):
    """What the environment answered is not of the interface."""


def _checked(check: Callable[[object], Any], value: object) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise _BadAnswer(str(error)) from None


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {one_line(error)}"[:2000]
    except Exception:  # an exception may fail to print itself
        return type(error).__name__


async def serve(connection: socket.socket, worker: Worker, unpacker: msgpack.Unpacker) -> None:
    """Until the rollout server is gone."""
    gone = asyncio.Event()

    def read() -> None:
        data = connection.recv(_READ_BYTES)
        if not data:
            gone.set()
            return
        unpacker.feed(data)
        for call in unpacker:
            worker.begin(call)

    asyncio.get_running_loop().add_reader(connection.fileno(), read)
    await gone.wait()


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    connection = socket.socket(fileno=descriptor)
    unpacker = msgpack.Unpacker(max_buffer_size=wire.MAX_BYTES)
    while (hello := next(unpacker, None)) is None:
        data = connection.recv(_READ_BYTES)
        if not data:
            return
        unpacker.feed(data)
    schema, use, options, agent, memory_mb = hello
    assert schema == wire.SCHEMA, f"the server speaks schema {schema}, this process {wire.SCHEMA}"
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    try:
        found = load(use)
        if not callable(found):
            raise ValueError(f"{use} is a {type(found).__name__} and no class or function")
        if not agent:
            found(**options)  # so that wrong options are found before the first sample
    except BaseException as error:
        connection.sendall(msgpack.packb([False, _words(error)]))
        return
    make = (lambda: None) if agent else (lambda: found(**options))
    worker = Worker(connection, make, (lambda **given: found(**given, **options)) if agent and options else found if agent else None)
    asyncio.run(_main(connection, worker, unpacker))


async def _main(connection: socket.socket, worker: Worker, unpacker: msgpack.Unpacker) -> None:
    asyncio.get_running_loop()  # its own descriptors are there before the first count
    connection.sendall(msgpack.packb([True, held()]))
    await serve(connection, worker, unpacker)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
    os._exit(0)  # threads of an environment that never end do not keep the process
