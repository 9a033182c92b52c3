"""Named points at which a test makes a process die, stop or fail. Without HEADRACE_FAULT every point is a no-op.

HEADRACE_FAULT="POINT=ACTION[@N]": at the N-th passage (1 by default) of POINT the process does ACTION:
`kill` (SIGKILL to itself), `stop` (SIGSTOP to its whole session), `raise` (RuntimeError).
HEADRACE_FAULT_ONCE=FILE: made when the fault fires; where it exists nothing fires, so that a restarted process lives.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_passages: dict[str, int] = {}


def point(name: str) -> None:
    """Passes a named point. Raises RuntimeError where a test asked for it."""
    wanted = os.environ.get("HEADRACE_FAULT", "")
    if not wanted.startswith(f"{name}="):
        return
    action, _, count = wanted.partition("=")[2].partition("@")
    _passages[name] = _passages.get(name, 0) + 1
    once = os.environ.get("HEADRACE_FAULT_ONCE", "")
    if _passages[name] != int(count or 1) or (once and Path(once).exists()):
        return
    if once:
        Path(once).touch()
    _fire(name, action)


def _fire(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.killpg(os.getsid(0), signal.SIGSTOP)
    elif action == "raise":
        raise RuntimeError(f"fault planted at {name}")
    else:
        raise ValueError(f"HEADRACE_FAULT: action {action!r} is none of kill, stop, raise")
