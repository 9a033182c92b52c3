"""What a child process owes its parent: to die with it. (deploy/child.py does the same before anything is imported.)"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the parent's thread that made it ends (prctl(2), PR_SET_PDEATHSIG; Linux only)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def die_with_multiprocessing_parent() -> None:
    """die_with_parent in a child of multiprocessing; nothing in a process that is none."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
