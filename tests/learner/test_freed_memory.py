"""Large buffers are used again instead of being asked of the kernel each time."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from learner.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for n in range(120):
    if n == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first, second = bytes(1 << 20), bytes(1 << 20)
    del first, second
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="mallopt's thresholds are glibc's")
def test_a_freed_mebibyte_costs_no_page_faults_again() -> None:
    # Each buffer has 256 pages of 4 KiB. `bytes(n)` is calloc: a fresh mapping is touched by nobody, one that is used again is cleared,
    # so kept memory is seen by the absence of mappings that come and go (at least one fault for each of 200 buffers).
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60).stdout)

    assert faults("kept") < 50 < 200 <= faults("given back")
