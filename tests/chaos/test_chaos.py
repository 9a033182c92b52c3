"""`make chaos`: half an hour of storms with new seeds, printed; a short one with a known seed among the fast tests.

HEADRACE_CHAOS_SEED=N begins with that seed, HEADRACE_CHAOS_MINUTES=M changes how long.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.chaos.faults import ALL, QUICK
from tests.chaos.storm import blow

STORM_S = 300.0


@pytest.mark.timeout(900)
def test_a_short_storm_leaves_a_run_that_goes_on_and_a_clean_audit(tmp_path: Path, tiny_model: Path) -> None:
    outcome = blow(tmp_path, tiny_model, seed=int(os.environ.get("HEADRACE_CHAOS_SEED", "1")), faults=QUICK, seconds=50, ranks=1)
    assert outcome.accounting.num_trained > 0


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_storms_leave_a_run_that_goes_on_and_a_clean_audit(tmp_path: Path, tiny_model: Path) -> None:
    end = time.monotonic() + 60 * float(os.environ.get("HEADRACE_CHAOS_MINUTES", "30"))
    seed = int(os.environ.get("HEADRACE_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    while (left_s := end - time.monotonic()) > 0:
        folder = tmp_path / str(seed)
        folder.mkdir()
        blow(folder, tiny_model, seed=seed, faults=ALL, seconds=min(STORM_S, left_s), ranks=1 + seed % 2, redis=seed // 2 % 2 == 1)
        seed += 1
