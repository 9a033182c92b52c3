"""What the learner's processes have in common: their line on stderr, their parent, their user's mistakes."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import yaml
from pydantic import ValidationError

from learner.config import LearnerConfig

_PR_SET_PDEATHSIG = 1
USER_MISTAKE = 2  # exit code: starting again would not help


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent ends (prctl(2), PR_SET_PDEATHSIG); exits at once when it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def log_to_stderr() -> None:
    """`HH:MM:SS name level message`, a line each."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")


def complain(message: str) -> int:
    """Says `headrace: <message>` in one line for each of the message's; the exit code to leave with."""
    for line in message.splitlines():
        sys.stderr.write(f"headrace: {line}\n")
    sys.stderr.flush()
    return USER_MISTAKE


def read_config(path: Path) -> LearnerConfig:
    """A YAML or JSON file. Raises ValueError with one line for each mistake, naming file, key, value and rule."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold a mapping of settings, holds {type(values).__name__}")
    try:
        return LearnerConfig.model_validate(values)
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, e['loc'])) or 'learner'}: {e['msg'].removeprefix('Value error, ')}{_value(e)}" for e in error.errors())
        raise ValueError("\n".join(lines)) from None


def _value(error: object) -> str:
    assert isinstance(error, dict)
    given = error.get("input")
    return "" if isinstance(given, dict) else f" (given: {given!r})"
