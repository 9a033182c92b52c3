"""Who holds something shared: a line that names a process of a machine, and whether that process is still there."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def describe() -> str:
    """This process, once: `HOST BOOT PID START TOKEN`. START tells it from a later process with the same pid."""
    pid = os.getpid()
    return f"{socket.gethostname()} {_boot()} {pid} {_start(pid)} {uuid.uuid4().hex}"


def is_here(holder: str) -> bool:
    """Whether it is a process of this machine, in its present life; then is_dead is certain."""
    return _fields(holder)[:2] == [socket.gethostname(), _boot()]


def is_dead(holder: str) -> bool:
    """Whether it certainly lives no more: a process of this machine that is gone."""
    if not is_here(holder):
        return False
    pid, start = _fields(holder)[2:4]
    return _start(int(pid)) != start


def _fields(holder: str) -> list[str]:
    fields = holder.split()
    return fields if len(fields) == 5 and fields[2].isdigit() else ["", "", "0", "", ""]


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.is_file() else "unknown"


def _start(pid: int) -> str:
    """Clock ticks from boot to the process's start; "gone" when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] in ("Z", "X") else fields[19]
