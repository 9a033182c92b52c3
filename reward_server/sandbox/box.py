"""One sandboxed run from outside: starts it, hears it out within a wall-clock limit, and leaves no process and no folder behind."""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reward_server.sandbox.jail import LAYERS

log = logging.getLogger("headrace.reward_server.sandbox")

_refused: set[frozenset[str]] = set()  # sets of layers that this machine does not really permit
_GRACE_S = 2.0  # beyond wall_s: for the start, and for killing and reaping
_OLD_S = 3600.0
_PREFIX = "headrace-sandbox-"
_ROOT = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.append(sys.argv[1]); from reward_server.sandbox import inside; inside.main(int(sys.argv[2]))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a program may use.

    Example: `Bounds(test_s=2.0, wall_s=10.0)`
    """

    test_s: float = 4.0  # wall clock, and CPU of each process, for one test
    wall_s: float = 10.0  # wall clock of all tests together
    memory_bytes: int = 1 << 30  # address space of each process, and resident memory of all together
    file_bytes: int = 16 << 20  # one file; all together twice as much
    output_bytes: int = 1 << 20  # printed by one test; more ends it
    processes: int = 32  # threads included
    layers: Sequence[str] = LAYERS  # those to try; fewer only where one is known to be in the way


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What became of one test's program.

    Example: `Ended(end="exit", stdout="5\\n")`
    """

    end: str  # "exit": by itself with code 0; "code 3"; "SIGKILL"; "time", "memory", "output": stopped for that
    stdout: str = ""  # what it printed, bounded
    proved: bool = False  # an asserting test was reached and passed
    returned: str = ""  # of a call: JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of all tests, and which layers of isolation held.

    Example: `Report(ended=[Ended(end="exit")], layers={"network": True, "processes": True, "files": True, "user": True})`
    """

    ended: list[Ended]  # one for each test, in order
    layers: Mapping[str, bool] = field(default_factory=dict)


def run(program: str, tests: Sequence[Mapping[str, Any]], bounds: Bounds, *, site: Sequence[str] = ()) -> Report:
    """Runs the program once for each test: {"kind": "stdin", "stdin"}, {"kind": "call", "function", "args"} or {"kind": "assert", "code"}.

    A machine may permit a layer in name and refuse what it needs: then the next smaller set of layers is tried, and remembered.
    Blocks for at most wall_s and some two seconds. Raises OSError when the sandbox itself could not be set up.
    """
    sets = [bounds.layers, [name for name in bounds.layers if name != "files"], [name for name in bounds.layers if name == "user"]]
    for layers in sets:
        if frozenset(layers) not in _refused:
            try:
                return _run(program, tests, replace(bounds, layers=layers), site)
            except _RefusedError as error:
                if layers == sets[-1]:
                    raise OSError(str(error)) from None
                log.warning("no sandbox with the layers %s: %s", ", ".join(layers), error)
                _refused.add(frozenset(layers))
    raise OSError(f"none of the sets of layers {sets} is permitted here")


class _RefusedError(Exception):
    """The machine refused what a layer needs."""


def _run(program: str, tests: Sequence[Mapping[str, Any]], bounds: Bounds, site: Sequence[str]) -> Report:
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    os.chmod(folder, 0o777)  # of a user that does not exist yet; only this sandbox's root lies in it
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _START, _ROOT, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd=folder, env={"LANG": "C.UTF-8"}, start_new_session=True,
            )  # fmt: skip
        try:
            job = _job(program, tests, bounds, folder, site)
            return _heard(ours, json.dumps(job).encode(), len(tests), time.monotonic() + bounds.wall_s + _GRACE_S, folder)
        finally:
            ours.close()
            _end(process)
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Removes folders that runs of this user left behind when they were killed more than an hour ago."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_uid == os.geteuid() and time.time() - path.stat().st_mtime > _OLD_S:
                shutil.rmtree(path, ignore_errors=True)


def _job(program: str, tests: Sequence[Mapping[str, Any]], bounds: Bounds, folder: str, site: Sequence[str]) -> dict[str, Any]:
    return {
        "program": program, "tests": [dict(test) for test in tests], "folder": folder, "site": list(site), "layers": list(bounds.layers),
        "test_s": bounds.test_s, "wall_s": bounds.wall_s, "memory_bytes": bounds.memory_bytes, "file_bytes": bounds.file_bytes,
        "output_bytes": bounds.output_bytes, "processes": bounds.processes,
    }  # fmt: skip


def _heard(line: socket.socket, job: bytes, num_tests: int, until_s: float, folder: str) -> Report:
    """Sends the job and reads a line for each test until all are there, the sandbox is gone, or the time is up: what is missing then was stopped."""
    line.settimeout(max(0.1, until_s - time.monotonic()))
    with suppress(BrokenPipeError, TimeoutError):
        line.sendall(len(job).to_bytes(8, "big") + job)
    ended: dict[int, Ended] = {}
    layers: dict[str, bool] | None = None
    for message in _lines(line, until_s):
        if "sandbox" in message:
            raise _RefusedError(f"no sandbox could be made: {message['sandbox']}")
        if "layers" in message:
            layers = message["layers"]
            if layers["files"]:
                os.rmdir(folder)  # its root is elsewhere now: nothing is left even if this process is killed
        else:
            index = message.pop("index")
            ended[index] = Ended(**message)
        if len(ended) == num_tests and layers is not None:
            break
    if layers is None:
        raise OSError("no sandbox could be made: its process ended, or took too long, before the program was started")
    return Report(ended=[ended.get(index, Ended(end="time")) for index in range(num_tests)], layers=layers)


def _lines(line: socket.socket, until_s: float) -> Any:
    waiting = b""
    while select.select([line], [], [], max(0.0, until_s - time.monotonic()))[0]:
        data = line.recv(1 << 18)
        if not data:
            return
        *whole, waiting = (waiting + data).split(b"\n") if b"\n" in data else [waiting + data]
        yield from map(json.loads, whole)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The keeper sees its line closed and takes everything down with it. If not: the same by force, keeper first, so that it is reaped by its parent."""
    for wait_s in (0.5, 0.5):
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
        with suppress(OSError):
            for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(word), signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
