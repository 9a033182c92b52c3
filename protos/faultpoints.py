"""Named points at which a test makes a process die, stop or fail. Without the variables below every point is a no-op.

HEADRACE_FAULT="POINT=ACTION[@N]": at the N-th passage (1 by default) of POINT the process does ACTION:
`kill` (SIGKILL to itself), `stop` (SIGSTOP to its whole session), `raise` (RuntimeError), `full` (OSError: no space left), `hang` (this
thread goes no further; the rest of the process lives), `slow:SECONDS` (sleeps at that passage and at every later one, as a slow disk would).
HEADRACE_FAULT_ONCE=FILE: made when the fault fires; where it exists nothing fires, so that a restarted process lives.
HEADRACE_FAULT_FILE=FILE: read at each passage; where it holds POINT=ACTION of the point that is passed, the first process to come
by takes the file away and does ACTION: so a test plants faults in processes that run already (`plant`).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from types import MappingProxyType

POINTS = MappingProxyType(
    {
        # gateway
        "before_fsync": "records are written to the journal and may be lost by a crash of the machine",
        "after_fsync": "records are in the journal, nobody was answered",
        "after_fsync_before_receipt": "a sample is in the journal, its actor does not know",
        "after_receipt": "an actor was sent the receipt of a sample",
        "after_lease_before_answer": "groups are lent, the actor does not know",
        "after_rollback_before_answer": "the account is rolled back, no rank knows",
        "before_plan": "a batch is about to be cut",
        "after_plan_before_answer": "a batch is cut, no rank knows",
        "before_close": "a trained policy is about to be published",
        "after_close_before_answer": "a version is published, the trainer does not know",
        "before_cut_marker": "a save is whole but is no cut yet",
        "after_cut_marker": "a cut is marked, retention and journal lag behind",
        # trainer rank
        "trainer_batch": "a rank has its batch and has not begun to train",
        "trainer_update": "a rank has made the updates of a step",
        "trainer_snapshot": "a rank has written its part of the snapshot, the step is not closed",
        "trainer_published": "a rank knows the version of the step",
        "trainer_save": "a rank is about to write its part of a save",
        # replica
        "receive_bucket": "a replica has received a bucket of a weight update",
        "before_submit": "a replica has a scored sample and has not sent it",
        "engine_step": "the engine's process is about to compute a step (its worker; with several each passes it)",
    }
)
ACTIONS = ("kill", "stop", "raise", "full", "hang", "slow:SECONDS")
FAULT, ONCE, FILE = "HEADRACE_FAULT", "HEADRACE_FAULT_ONCE", "HEADRACE_FAULT_FILE"
_passages: dict[str, int] = {}


def parse(setting: str) -> tuple[str, str, int]:
    """(point, action, passage) of POINT=ACTION[@N]. Raises ValueError naming what is wrong."""
    name, _, rest = setting.partition("=")
    action, _, count = rest.partition("@")
    if name not in POINTS:
        raise ValueError(f"{FAULT}={setting}: no such point {name!r}; use one of {', '.join(sorted(POINTS))}")
    if action not in ACTIONS[:-1] and not _is_slow(action):
        raise ValueError(f"{FAULT}={setting}: action {action!r} is none of {', '.join(ACTIONS)}")
    if not (count or "1").isdigit() or int(count or 1) < 1:
        raise ValueError(f"{FAULT}={setting}: passage {count!r} is not a number from 1")
    return name, action, int(count or 1)


def planted() -> bool:
    """Whether any fault may fire in this process, so that a hot path is left alone otherwise."""
    return bool(os.environ.get(FAULT, "") or os.environ.get(FILE, ""))


def check() -> None:
    """Called at the start of a service, so that a misspelt fault fails then and not never. Raises ValueError."""
    if setting := os.environ.get(FAULT, ""):
        parse(setting)


def point(name: str) -> None:
    """Passes a named point. Raises RuntimeError or OSError where a test asked for it."""
    assert name in POINTS, f"{name} is not a named point"
    if setting := os.environ.get(FAULT, ""):
        _pass(name, setting)
    if file := os.environ.get(FILE, ""):
        _pass_planted(name, Path(file))


def plant(file: Path, setting: str) -> None:
    """For the test: the next process to pass the point does the action. Raises ValueError for a misspelt setting."""
    parse(setting)
    part = file.with_name(file.name + ".part")
    part.write_text(setting)
    part.replace(file)


def _pass(name: str, setting: str) -> None:
    wanted, action, passage = parse(setting)
    if wanted != name:
        return
    once = os.environ.get(ONCE, "")
    _passages[name] = _passages.get(name, 0) + 1
    if _is_slow(action):
        if _passages[name] >= passage:
            _fire(name, action)
        return
    if _passages[name] != passage or (once and Path(once).exists()):
        return
    if once:
        Path(once).touch()
    _fire(name, action)


def _pass_planted(name: str, file: Path) -> None:
    """A slow point stays slow for as long as its file is there; every other fault is for one process, once."""
    try:
        setting = file.read_text()
        if not setting.startswith(f"{name}="):
            return
        if _is_slow(parse(setting)[1]):
            _fire(name, parse(setting)[1])
            return
        file.rename(file.with_name(f"{file.name}.fired"))  # of several processes one succeeds
    except FileNotFoundError:
        return
    _fire(name, parse(setting)[1])


def _is_slow(action: str) -> bool:
    """Whether it is slow:SECONDS, of at most a minute."""
    word, colon, seconds = action.partition(":")
    try:
        return bool(word == "slow" and colon and 0 < float(seconds) <= 60)
    except ValueError:
        return False


def _fire(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.killpg(os.getsid(0), signal.SIGSTOP)
    elif action == "hang":
        while True:
            time.sleep(3600)
    elif _is_slow(action):
        time.sleep(float(action.partition(":")[2]))
    elif action == "full":
        raise OSError(errno.ENOSPC, f"no space left, as planted at {name}")
    else:
        raise RuntimeError(f"fault planted at {name}")
