"""What every thread of a process is doing, asked for from outside, without harm to it.

A process that is `answering` writes its stacks when it gets the signal ASK: by faulthandler, in the signal handler itself, so it answers
while its event loop is blocked or another thread holds the interpreter's lock, and system calls go on afterwards (SA_RESTART). It
writes into a file in memory that is its own and has its process id in the name. Who asks (`ask`) looks for that file first, and sends the
signal through a handle of the very process that it looked at: a process that does not answer, that was made anew under the same number,
or that is a fork on its way into another program, is never sent a signal that would end it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protos.processes import descendants

ASK = signal.SIGRTMIN + 9  # used by nothing else here: SIGUSR1 ends a gateway, vLLM and torch have theirs for SIGUSR1 and SIGUSR2
RUN_VARIABLE = "HEADRACE_RUN_DIR"  # in the environment of every process of a launched run
MAX_BYTES = 256 << 10  # of one process's stacks
_NAME = "headrace-stacks-{pid}"
_STILL_S = 0.05  # without a byte more, the stacks are whole
_file: IO[bytes] | None = None


def answering() -> None:
    """From now on this process answers. Idempotent; a fork does not answer until it has called this itself."""
    global _file
    name = _NAME.format(pid=os.getpid())
    if _file is not None and _link(os.getpid(), _file.fileno()) == name:
        return
    descriptor = os.memfd_create(name)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)  # who asks empties it before
    _file = os.fdopen(descriptor, "wb", buffering=0)
    faulthandler.register(ASK, file=_file, all_threads=True, chain=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What one process said, or why it said nothing. Example: `Process(pid=7, name="learner.trainer rank 0", text="S futex_wait...")`"""

    pid: int
    name: str
    text: str


def ask(pids: Iterable[int], *, limit_s: float = 3.0) -> list[Process]:
    """Each process's state and stacks, all asked at once. Blocks up to limit_s."""
    asked = [(pid, _Question(pid)) for pid in dict.fromkeys(pids)]
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s and not all(question.is_answered() for _, question in asked):
        time.sleep(0.02)
    return [Process(pid=pid, name=name_of(pid), text=question.close()) for pid, question in asked]


def name_of(pid: int) -> str:
    """The command line without the interpreter, shortened. Example: "-m learner.gateway --config /runs/a/resolved/learner.json\""""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    return " ".join(word for word in words[1:] if word)[:200] or words[0] or "?"


def processes_of(run_dir: Path) -> list[int]:
    """Processes of this machine that the run's launcher started, and all below them."""
    started = [pid for pid, environment in _everyone() if environment.get(RUN_VARIABLE) == str(run_dir)]
    return list(dict.fromkeys(below for pid in started for below in family(pid)))


def _everyone() -> Iterator[tuple[int, dict[str, str]]]:
    """This user's processes with the environment that each was started with."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parts = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # gone, or somebody else's
        yield int(entry.name), dict(part.split("=", 1) for part in parts if "=" in part)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *descendants(pid)]


def machine() -> str:
    """Names the space that process ids are of: equal for two processes that can see each other's."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


class _Question:
    """One process that is being asked."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._state = state_of(pid)
        self._file: IO[bytes] | None = None
        self._why = ""
        self._size, self._since_s = 0, time.monotonic()
        try:
            self._ask()
        except (OSError, ValueError) as error:
            self._why = f"not asked: {error}"

    def _ask(self) -> None:
        handle = os.pidfd_open(self._pid)
        try:
            descriptor = _answers_in(self._pid)
            if descriptor is None:
                self._why = "not asked: it is no Python process of Headrace, or has not begun to answer"
                return
            self._file = open(f"/proc/{self._pid}/fd/{descriptor}", "r+b", buffering=0)  # noqa: SIM115
            self._file.truncate(0)
            signal.pidfd_send_signal(handle, ASK)
        finally:
            os.close(handle)

    def is_answered(self) -> bool:
        if self._file is None:
            return True
        size = os.fstat(self._file.fileno()).st_size
        if size != self._size:
            self._size, self._since_s = size, time.monotonic()
        return bool(size) and time.monotonic() - self._since_s >= _STILL_S

    def close(self) -> str:
        """State and stacks, or why there are none."""
        if self._file is None:
            return f"{self._state}\n{self._why}\n"
        with self._file as file:
            file.seek(0)
            text = file.read(MAX_BYTES).decode(errors="replace")
        return f"{self._state}\n" + (text or "asked, and it has not answered: it is stopped, or waits in the kernel where no signal reaches it\n")


def state_of(pid: int) -> str:
    """One line from the kernel: running, sleeping, stopped; where it waits; threads and memory."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    except OSError:
        return "gone"
    try:
        waits = Path(f"/proc/{pid}/wchan").read_text().strip("0") or "nowhere"
    except OSError:
        waits = "?"
    return f"state {status.get('State', '?').strip()}; waits in {waits}; {status.get('Threads', '?').strip()} threads; resident {status.get('VmRSS', '?').strip()}"


def _answers_in(pid: int) -> int | None:
    """Descriptor of its file, if it has one of its own and catches ASK."""
    caught = next((line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    if not int(caught.split()[1], 16) >> (ASK - 1) & 1:
        return None
    name = _NAME.format(pid=pid)
    return next((int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir() if _link(pid, int(entry.name)) == name), None)


def _link(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").removeprefix("/memfd:").removesuffix(" (deleted)")
    except OSError:
        return ""
