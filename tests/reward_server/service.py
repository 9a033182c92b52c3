"""`python -m reward_server` as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, config: object, *options: str) -> subprocess.Popen[str]:
    """Starts it in a folder, with its configuration there."""
    (folder / "reward.yaml").write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [sys.executable, "-m", "reward_server", "--config", "reward.yaml", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(folder: Path, config: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A service that runs: its address and its process."""
    process = start(folder, config, "--address-file", "address")
    try:
        until_s = time.monotonic() + 30
        while not (folder / "address").exists():
            assert process.poll() is None and time.monotonic() < until_s, process.communicate(timeout=5)[1]
            time.sleep(0.05)
        yield (folder / "address").read_text(), process
    finally:
        process.kill()
        process.communicate()


def workers_of(pid: int) -> list[int]:
    """Its live scorer processes."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
