"""The clock that chaos sets is seen by this program's modules and by nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import time, types
ours, theirs = types.ModuleType("learner.gateway.leases"), types.ModuleType("grpc._channel")
for module in (ours, theirs):
    exec("import time\\ndef now(): return time.time()\\ndef now_ns(): return time.time_ns()", module.__dict__)
print(round(ours.now() - theirs.now()), round((ours.now_ns() - theirs.now_ns()) / 1e9))
"""


def test_only_our_own_modules_see_the_step(tmp_path: Path) -> None:
    (tmp_path / "clock").write_text("-3600")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/chaos/plugins"), "HEADRACE_CLOCK_FILE": str(tmp_path / "clock")}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "-3600 -3600\n"
