"""Scorers as users write them, good and bad. The completion says what to do, so that one scorer can be both."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from reward_server import Unscored

KNOWN = "a plain value"


def one(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Always one.

    More text that no list shows.
    """
    return 1.0


def behaves(prompt: str, completion: str, fields: dict[str, Any]) -> Any:
    """Does what the completion says."""
    return _ACTIONS[completion](fields) if completion in _ACTIONS else float(completion)


def _sleep(fields: dict[str, Any]) -> float:
    time.sleep(60)
    return 1.0


def _raise(fields: dict[str, Any]) -> float:
    raise KeyError("no such thing")


def _bad_words(fields: dict[str, Any]) -> float:
    raise RuntimeError("half a pair: \ud800")


def _print(fields: dict[str, Any]) -> float:
    while True:
        print("tell the whole world " * 10)


def _allocate(fields: dict[str, Any]) -> float:
    return float(len(bytearray(2 << 30)))  # the kernel gives zeroed pages: none is touched


def _leave_a_child(fields: dict[str, Any]) -> float:
    import subprocess

    child = subprocess.Popen(["sleep", "300"])
    Path(fields["pid_file"]).write_text(str(child.pid))
    time.sleep(60)
    return 1.0


def _close_everything(fields: dict[str, Any]) -> float:
    os.closerange(3, 1000)
    time.sleep(60)
    return 1.0


def _ignore_signals(fields: dict[str, Any]) -> float:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def _backtrack(fields: dict[str, Any]) -> float:
    import re

    return float(bool(re.fullmatch(r"(a+)+", "a" * 60 + "b")))


_ACTIONS: dict[str, Any] = {
    "sleep": _sleep,
    "raise": _raise,
    "bad words": _bad_words,
    "print": _print,
    "allocate": _allocate,
    "child": _leave_a_child,
    "close": _close_everything,
    "ignore signals": _ignore_signals,
    "backtrack": _backtrack,
    "exit": lambda fields: os._exit(0),
    "segfault": lambda fields: os.kill(os.getpid(), 11),
    "sys.exit": lambda fields: sys.exit(3),
    "nan": lambda fields: float("nan"),
    "inf": lambda fields: float("inf"),
    "text": lambda fields: "0.5",
    "none": lambda fields: None,
    "parts": lambda fields: (0.5, {"format": 1, "answer": 0.25}),
    "dict": lambda fields: {"score": True, "tests": 3},
    "nan part": lambda fields: (0.5, {"format": float("nan")}),
    "unscored": lambda fields: Unscored("no gold answer"),
    "pid": lambda fields: os.getpid(),
    "fields": lambda fields: {"score": 1, **{name: type(value) is int for name, value in fields.items()}},
}


def tells_length(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Characters of prompt and completion."""
    return float(len(prompt) + len(completion))


def weighted(prompt: str, completion: str, fields: dict[str, Any], *, weight: float) -> float:
    """Takes an argument."""
    return weight * float(completion)


def slowly(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Takes as many seconds as the completion says, and notes that it was called."""
    with Path(fields["calls"]).open("a") as file:
        file.write(".")
    time.sleep(float(completion))
    return 1.0


def sleeps(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Sleeps as many seconds as the completion says."""
    time.sleep(float(completion))
    return 1.0


async def waits(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Awaits as many seconds as the completion says."""
    if completion == "exit":
        os._exit(7)
    if completion == "raise":
        raise KeyError("no such thing")
    await asyncio.sleep(float(completion))
    return 1.0


async def blocks(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """An async function that should not have been one."""
    time.sleep(float(completion))  # noqa: ASYNC251  # the mistake is the point
    return 1.0


class Judge:
    """A callable object."""

    def __call__(self, prompt: str, completion: str, fields: dict[str, Any]) -> float:
        """Judges."""
        return 0.25


judge = Judge()


def says_it_differs(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Says of itself that the same item may score differently."""
    return slowly(prompt, completion, fields)


says_it_differs.is_deterministic = False  # type: ignore[attr-defined]  # that is how a function says it


def longest(prompt: str, completions: list[str], fields: dict[str, Any]) -> Any:
    """1 for the longest of a group, 0 for the others; the first one may say what to do instead."""
    if completions[0] == "sleep":
        time.sleep(60)
    if completions[0] == "exit":
        os._exit(3)
    if completions[0] in ("few", "text"):
        return {"few": [1.0], "text": ["a", "b"]}[completions[0]]
    most = max(map(len, completions))
    return [float(len(each) == most) for each in completions]


def is_longer(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Compares with the record's field `other`."""
    return float(len(completion) > len(fields["other"]))
