"""What the learner's processes have in common: their line on stderr, their incarnations, their user's mistakes."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path

from learner.config import LearnerConfig
from protos import config_file, logs

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
USER_MISTAKE = 2  # exit code: starting again would not help
END = signal.SIGUSR1  # how the learner tells its gateway to end; SIGTERM and SIGINT may come to a whole group or machine at once


def keep_freed_memory() -> None:
    """Buffers up to 32 MiB are kept for the next ones, up to 256 MiB in all, instead of going back to the kernel each time (mallopt(3)):
    a message of a mebibyte costs 256 page faults otherwise, twice. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def next_incarnation(run_dir: Path, before: int = 0) -> int:
    """Nanoseconds since the epoch, but more than `before` and than any that this run had: a clock that was set back must not make
    a new trainer look like an older one, which the gateway refuses."""
    path = run_dir / "incarnation"
    try:
        before = max(before, int(path.read_text()))
    except (OSError, ValueError):
        pass  # the first one; or a disk that lost it, and then the clock has to do
    number = max(time.time_ns(), before + 1)
    try:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(f"{number}\n")
        part.replace(path)
    except OSError as error:
        logging.getLogger("headrace.learner.process").warning("%s: %s; a later start relies on the clock", path, error)
    return number


def log_to_stderr() -> None:
    """`HH:MM:SS name level message`, a line each."""
    logging.basicConfig(level=logs.level(), stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # transformers imports it wherever it is installed, and it tells of kernels that this machine has no use for


def complain(message: str) -> int:
    """Says `headrace: <message>` in one line for each of the message's; the exit code to leave with."""
    for line in message.splitlines():
        sys.stderr.write(f"headrace: {line}\n")
    sys.stderr.flush()
    return USER_MISTAKE


def read_config(path: Path) -> LearnerConfig:
    """A YAML or JSON file. Raises ValueError with one line for each mistake, naming file, key, value and rule."""
    return config_file.read(path, LearnerConfig)
