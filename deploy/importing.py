"""`python -m deploy.importing`: imports one thing that a run file names, said on standard input, and says what is wrong. See uses.py.

Users' modules run here only; what they print goes nowhere.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any


def scorer(name: str, arguments: dict[str, Any]) -> None:
    """As a reward server's process does, without models. Raises ValueError."""
    from reward_server.registry import load

    load(name, arguments, loads_models=False)


def environment(name: str, options: dict[str, Any]) -> None:
    """As an environment's process does, without making one. Raises ValueError."""
    from rollout_server.environments.worker import load

    found = load(name)
    _callable(found)
    _fits(found, options)
    if inspect.isclass(found) and (missing := [each for each in ("reset", "step") if not callable(getattr(found, each, None))]):
        raise ValueError(f"{found.__name__} has no {' and no '.join(missing)}: docs/environments.md says what an environment has")


def agent(name: str, options: dict[str, Any]) -> None:
    """The same of an agent, which is called with its task and an endpoint. Raises ValueError."""
    from rollout_server.environments.worker import load

    found = load(name)
    _callable(found)
    _fits(found, {"task": None, "base_url": "", "api_key": "", **options})


def function(name: str, _: dict[str, Any]) -> None:
    """A trainer's own function. Raises ValueError."""
    from learner.trainer.plug import load_function

    try:
        load_function(name, key="")
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"={name}: ")) from None


def _callable(found: Any) -> None:
    if not callable(found):
        raise ValueError(f"it is of type {type(found).__name__} and neither class nor function")


def _fits(found: Any, keywords: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # some classes of C tell none
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ValueError(f"it takes {signature}, which does not fit {', '.join(keywords) or 'a call without arguments'}: {error}") from None


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    wrong = ""
    try:
        {"scorer": scorer, "environment": environment, "agent": agent, "function": function}[asked["kind"]](asked["name"], asked["arguments"])
    except BaseException as error:  # a user's module may raise what it likes
        wrong = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    os.write(answer, json.dumps({"wrong": wrong}).encode())
    os._exit(0)  # whatever threads it has started


if __name__ == "__main__":
    main()
