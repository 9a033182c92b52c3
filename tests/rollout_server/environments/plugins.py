"""Environments of the tests: good ones, and one of each way to be bad."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

from rollout_server.environments.interface import Action, Step, Task

_KEPT: list[Any] = []


class Echo:
    """Says back what it was told, `turns` times; a reward of 1 a turn."""

    def __init__(self, *, turns: int = 2) -> None:
        self.left = turns

    async def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: Action) -> Step:
        self.left -= 1
        return Step(observation=f"[{action.text}]", reward=1.0, done=self.left == 0)

    async def close(self) -> None: ...


class Bad:
    """The record's field `how` says in which way, `when` at what: reset, step or close."""

    def reset(self, task: Task) -> Any:
        self.how, self.when = str(task.fields.get("how", "")), task.fields.get("when", "step")
        return self._at("reset") or task.prompt

    def step(self, action: Action) -> Any:
        said = self._at("step")
        return said if said is not None else Step(observation=" and?", reward=1.0, done=action.turn == 1)

    def close(self) -> None:
        self._at("close")

    def _at(self, when: str) -> Any:
        if when != self.when:
            return None
        match self.how:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise RuntimeError("the world is broken")
            case "exit":
                os._exit(3)
            case "sys_exit":
                sys.exit(3)
            case "garbage":
                return object()
            case "nan":
                return Step(reward=float("nan"), done=True)
            case "number":
                return 7
            case "memory":
                _KEPT.append(bytearray(1 << 40))
            case "leak_children":  # one that left its session and ignores SIGTERM
                _KEPT.append(subprocess.Popen([sys.executable, "-c", "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid() if os.getpgid(0) != os.getpid() else 0; time.sleep(3600)"], start_new_session=True))
            case "leak_files":
                _KEPT.extend(open(os.devnull) for _ in range(50))  # noqa: SIM115
            case "leak_threads":
                for _ in range(5):
                    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
            case "print":
                print("x" * 100_000)  # an environment that talks must not hold up its server
        return None


class Silent:
    """Two turns, no reward."""

    def reset(self, task: Task) -> str:
        return task.prompt

    def step(self, action: Action) -> Step:
        return Step(observation=" go on", done=action.turn == 1)


def hopeless(**_: Any) -> None:
    raise RuntimeError("no such luck")
