"""The soak's rules tell a leak from an allocator that settles, and a short soak of a real server passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.system.harness import ROOT
from tests.system.soak.flatness import Reading, judge, slope_per_h


def readings(rss_mib: Callable[[float], float], *, num_files: Callable[[float], int] = lambda _: 40, minutes: int = 60) -> list[Reading]:
    """One a minute; the functions are of the minutes since the start."""
    return [Reading(at_s=60.0 * m, rss_mib=rss_mib(m), num_files=num_files(m), num_threads=20) for m in range(minutes + 1)]


def test_the_slope_is_that_of_most_pairs() -> None:
    # 10, 11, 12 at 0, 30, 60 minutes: each pair rises by 2 an hour. The outlier 500 spoils 4 of 10 pairs' slopes, not their median.
    assert slope_per_h([0, 1800, 3600], [10, 11, 12]) == pytest.approx(2)
    assert slope_per_h([0, 900, 1800, 2700, 3600], [10, 10.5, 11, 500, 12]) == pytest.approx(2)
    with pytest.raises(ValueError, match="longer"):
        slope_per_h([0], [1])


def test_a_leak_is_found_and_a_step_of_the_allocator_is_not() -> None:
    # 30 MiB an hour: 15 MiB over the second half-hour; allowed are 6 + 12 x 0.5 = 12.
    leaks = judge("core", readings(lambda m: 500 + 0.5 * m))
    assert leaks.slope_mib_per_h == pytest.approx(30) and leaks.growth_mib == pytest.approx(15) and leaks.allowed_mib == pytest.approx(12)
    assert len(leaks.broken) == 1 and "memory of core grew by 15.0 MiB" in leaks.broken[0]
    # 200 MiB within the first ten minutes, then flat; and one step of 8 MiB in the last quarter of an hour, most pairs of which are flat
    assert not judge("core", readings(lambda m: 500 + 20 * min(m, 10))).broken
    assert not judge("core", readings(lambda m: 500 + (8 if m > 52 else 0))).broken


def test_descriptors_that_pile_up_are_found() -> None:
    # one more every five minutes: at most 40 + 5 in the second quarter (minutes 15 to 29), 40 + 12 in the last
    verdict = judge("server", readings(lambda _: 500, num_files=lambda m: 40 + int(m / 5)))
    assert verdict.files == (45, 52) and verdict.broken == ("file descriptors of server rose from 45 to 52, allowed are 4 more",)
    assert not judge("server", readings(lambda _: 500, num_files=lambda m: 40 + int(m) % 4)).broken


def test_too_few_readings_are_refused() -> None:
    with pytest.raises(ValueError, match="7 times"):
        judge("server", readings(lambda _: 500, minutes=6))


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_minute_of_it_passes_on_a_real_server() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.system.soak", "--minutes", "1", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=400, check=False)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["broken"] == [] and done.returncode == 0
    assert line["left"] == {"running_requests": 0, "waiting_requests": 0, "kv_use_ratio": 0}
