"""The instants at which a test may want the gateway to die, and two ways to ask for it.

A testing aid: HEADRACE_KILL_AT=<name> makes the process send itself SIGKILL when it first reaches that point,
HEADRACE_KILL_AT=<name>:<n> when it reaches it for the n-th time. HEADRACE_FAULT of protos/faultpoints.py works at the same
points, with its other actions. Neither set, `reach` does nothing.
"""

from __future__ import annotations

import os
import signal

from protos import faultpoints

POINTS = frozenset(
    {
        "after_fsync_before_receipt",  # a sample is in the journal, its actor does not know
        "after_lease_before_answer",  # groups are lent, the actor does not know
        "after_rollback_before_answer",  # the account is rolled back, no rank knows
        "after_plan_before_answer",  # a batch is cut, no rank knows
        "after_close_before_answer",  # a version is published, the trainer does not know
        "before_cut_marker",  # a save is whole but is no cut yet
        "after_cut_marker",  # a cut is marked, retention and journal lag behind
    }
)
VARIABLE = "HEADRACE_KILL_AT"
_passages: dict[str, int] = {}


def wanted(setting: str) -> tuple[str, int]:
    """The point and the passage that a setting names; ("", 0) for an empty one. Raises ValueError for an unknown point."""
    if not setting:
        return "", 0
    name, _, count = setting.partition(":")
    if name not in POINTS or not (count or "1").isdigit():
        raise ValueError(f"{VARIABLE}={setting}: no such point; use one of {', '.join(sorted(POINTS))}, optionally with :<n>")
    return name, int(count or 1)


def reach(name: str) -> None:
    """Passes a point; dies here when the environment asks for it."""
    assert name in POINTS, f"{name} is not a named point"
    faultpoints.point(name)
    point, passage = wanted(os.environ.get(VARIABLE, ""))
    if point == name:
        _passages[name] = _passages.get(name, 0) + 1
        if _passages[name] == passage:
            os.kill(os.getpid(), signal.SIGKILL)
