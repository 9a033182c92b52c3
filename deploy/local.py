"""The services of one machine as processes of it.

Every process has its own session: a Ctrl-C reaches the launcher alone, and a stop can kill what a service left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.keeper import Keeper, Life, Policy, exit_words
from deploy.services import Service

log = logging.getLogger("headrace.deploy.local")
CHILD = Path(__file__).with_name("child.py")


class Local(Keeper[Service]):
    """The launcher of one machine. Example: see Keeper."""

    def __init__(self, policy: Policy | None = None, on_event: Callable[[str], None] = log.info) -> None:
        super().__init__(policy, on_event)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def _kill_all(self) -> None:
        for process in self._processes.values():
            _kill_session(process.pid)

    async def _live(self, service: Service) -> Life:
        """One life of a service; code 127 where it cannot be started."""
        try:
            process = await _spawn(service)
        except OSError as error:
            return Life(code=127, words=f"it cannot be started: {error}")
        self._processes[service.name] = process
        try:
            async with self._checking(service.name, service.address, service.security, service.health):
                code = await process.wait()
            return Life(code=code, words=exit_words(code))
        except asyncio.CancelledError:
            await _terminate(process, max(self._policy.grace_s, service.grace_s))
            raise
        finally:
            _kill_session(process.pid)
            self._processes.pop(service.name, None)


async def _spawn(service: Service) -> asyncio.subprocess.Process:
    service.log.parent.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *service.command)
    with service.log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **service.environment},
            start_new_session=True,
        )


async def _terminate(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        log.warning("process %d ignored SIGTERM for %.0f s: killed", process.pid, grace_s)
        _kill_session(process.pid)
        await process.wait()


def _kill_session(pid: int) -> None:
    """Whatever is left of a process group whose leader was `pid`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
