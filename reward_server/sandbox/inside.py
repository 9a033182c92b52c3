"""The inside of a sandbox: `main(fd)` in a fresh interpreter. Standard library only.

      box.run ── job ──▶ main ── leaves namespaces, forks ──▶ keeper (process 1 inside) ── forks ──▶ one program a test
                 ◀── one line a test ─────────────────────────┘   watches clock, output and memory; kills and reaps all

The keeper is trusted and holds no expected answer: what a program printed or returned is compared outside. The program gets
neither the keeper's descriptors nor (it is another user, or has fewer capabilities) its memory.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from reward_server.sandbox import child, jail

TICK_S = 0.02
_FAILED = "sandbox"
_TELLS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def main(descriptor: int) -> NoReturn:
    """Does one job and ends. Whoever starts it closes the other end of the socket to end it sooner."""
    jail.die_with_parent()
    line = socket.socket(fileno=descriptor)
    job = json.loads(_received(line, int.from_bytes(_received(line, 8), "big")))
    number = os.getpid()
    try:
        layers = jail.leave(frozenset(job["layers"]))
    except OSError as error:  # a machine may let a process leave, and then do nothing there
        _say(line, {_FAILED: str(error)})
        os._exit(1)
    if layers["processes"]:
        inner = os.fork()
        if inner:
            os.waitpid(inner, 0)
            os._exit(0)
        jail.die_with_parent()
    else:
        jail.adopt_orphans()
    try:
        layers["files"] = layers["files"] and jail.new_root(job["folder"], job["file_bytes"] * 2, layers["processes"])
    except OSError as error:
        _say(line, {_FAILED: str(error)})
        os._exit(1)
    if not layers["files"]:
        os.chdir(job["folder"])
    jail.hide_memory(True)
    layers["user"] = os.geteuid() != 0 or ("user" in job["layers"] and _can_be_another(number))
    _say(line, {"layers": layers})
    _Keeper(line, job, layers, number).run()
    os._exit(0)


def _received(line: socket.socket, num_bytes: int) -> bytes:
    """So many bytes. Ends this process when the other side goes before."""
    parts = bytearray()
    while len(parts) < num_bytes:
        data = line.recv(num_bytes - len(parts))
        if not data:
            os._exit(1)
        parts += data
    return bytes(parts)


def _say(line: socket.socket, message: dict[str, Any]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def _can_be_another(number: int) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if jail.other_user(number) else 1)
    return os.waitpid(pid, 0)[1] == 0


class _Keeper:
    """Runs the tests of a job one after another."""

    def __init__(self, line: socket.socket, job: dict[str, Any], layers: dict[str, bool], number: int) -> None:
        self._line = line
        self._job = job
        self._layers = layers
        self._number = number

    def run(self) -> None:
        until_s = time.monotonic() + self._job["wall_s"]
        for index, test in enumerate(self._job["tests"]):
            left_s = until_s - time.monotonic()
            said = self._test(test, min(self._job["test_s"], left_s)) if left_s > 0 else {"end": "time"}
            _say(self._line, {"index": index, **said})

    def _test(self, test: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """What became of one program: how it ended, what it printed, what it returned or proved."""
        out_r, out_w = os.pipe()
        ours, theirs = socket.socketpair()
        stdin = os.memfd_create("stdin")
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(test.get("stdin", "").encode("utf-8", "surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        ask = secrets.token_bytes(16)
        pid = os.fork()
        if pid == 0:
            child.become(self._job, test, ask, self._number if self._layers["user"] else -1, (stdin, out_w, theirs.fileno()))
        for each in (out_w, stdin):
            os.close(each)
        theirs.close()
        try:
            return _Watch(pid, ask, (out_r, ours, self._line), self._job, limit_s, self._others).result()
        finally:
            self._kill_all()
            os.close(out_r)
            ours.close()

    def _others(self) -> list[int]:
        """Every process of the tree but this one, as /proc numbers them: it may be that of the outer namespace."""
        with suppress(OSError):
            found, new = [], [int(os.readlink("/proc/self"))]
            while new:
                new = [each for pid in new for each in _children(pid)]
                found += new
            return found
        return []  # no /proc inside: each process is still bounded by itself

    def _kill_all(self) -> None:
        """SIGKILL to the whole tree until nothing of it is left, and everything is reaped. In a namespace no process can hide."""
        while True:
            if self._layers["processes"]:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in self._others():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
        words = [_text(f"/proc/{pid}/task/{task}/children") for task in tasks]
        return [int(word) for each in words for word in each.split()] if _TELLS_CHILDREN else _by_parent(pid)
    return []


def _by_parent(pid: int) -> list[int]:
    """Children, on a kernel that does not list them: every process is asked for its parent."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [each for each in numbers if _text(f"/proc/{each}/stat").rpartition(")")[2].split()[1:2] == [str(pid)]]


def _text(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read()
    return ""


class _Watch:
    """One running program: reads what it prints, answers its claim, and says when it must end."""

    def __init__(self, pid: int, ask: bytes, ends: tuple[int, socket.socket, socket.socket], job: dict[str, Any], limit_s: float, others: Callable[[], list[int]]) -> None:
        self._pid = pid
        self._ask = ask
        self._output, self._claim, self._line = ends  # what it prints, what it claims, and who waits for the result
        self._job = job
        self._until_s = time.monotonic() + limit_s
        self._others = others
        self._printed = bytearray()
        self._claimed = bytearray()
        self._nonce = secrets.token_hex(16).encode()

    def result(self) -> dict[str, Any]:
        exited = os.pidfd_open(self._pid)
        open_ends = {self._output, self._claim.fileno()}
        try:
            while True:
                ready, _, _ = select.select([exited, self._line.fileno(), *open_ends], [], [], TICK_S)
                for end in list(open_ends.intersection(ready)):
                    if not self._read(end):
                        open_ends.discard(end)
                why = self._excess()
                if why:
                    return self._said(why)
                if exited in ready and not open_ends.intersection(ready):
                    return self._said(self._how())
                if self._line.fileno() in ready:
                    os._exit(1)  # nobody waits for the result any more
        finally:
            os.close(exited)

    def _read(self, end: int) -> bool:
        """Whether more may come."""
        if end == self._output:
            data = os.read(end, 1 << 16)
            self._printed += data
            return bool(data)
        with suppress(OSError):  # it may be gone
            data = self._claim.recv(1 << 16)
            if data == self._ask and not self._claimed:  # only now is the nonce in the program's process
                self._claim.sendall(self._nonce)
            else:
                self._claimed += data
            return bool(data)
        return False

    def _excess(self) -> str:
        if len(self._printed) > self._job["output_bytes"] or len(self._claimed) > self._job["output_bytes"]:
            return "output"
        if time.monotonic() > self._until_s:
            return "time"
        pages = sum(int((_text(f"/proc/{pid}/statm").split() or "00")[1]) for pid in self._others())
        return "memory" if pages * 4096 > self._job["memory_bytes"] else ""

    def _how(self) -> str:
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return "exit" if code == 0 else f"code {code}" if code > 0 else signal.Signals(-code).name

    def _said(self, end: str) -> dict[str, Any]:
        printed = self._printed[: self._job["output_bytes"]].decode("utf-8", "replace")
        proved = bytes(self._claimed) == self._nonce
        return {"end": end, "stdout": printed, "proved": proved, "returned": "" if proved else self._claimed.decode("utf-8", "replace")}
