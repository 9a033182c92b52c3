"""Every planted fault is caught by the tests of the module it is planted in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("mutations.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_planted_fault_is_caught() -> None:
    root = FILE.parents[3]
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, check=False, timeout=850, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("caught ") >= 20
