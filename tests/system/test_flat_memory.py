"""Two hundred steps of a whole run: no process of any role keeps a batch alive.

    pytest -m slow -s tests/system/test_flat_memory.py       prints MiB a step of each process
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil
import pytest

from tests.system.harness import Run, process_tree, running, wait_for
from tests.system.soak.flatness import slope_per_h

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

WARM_UP, STEPS, EVERY = 60, 260, 5
MOST_MIB_PER_STEP = 0.1e6 / (1 << 20)


def looked_at(run: Run) -> dict[str, float]:
    """MiB of every process of the run, by service, command and number."""
    found = {}
    for name, service in run.services.items():
        for pid in process_tree(service.process.pid):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                words = process.cmdline()
                module = words[words.index("-m") + 1] if "-m" in words else "spawned"
                found[f"{name}: {module} ({pid})"] = process.memory_info().rss / (1 << 20)
    return found


def test_two_hundred_steps_leave_every_role_s_memory_where_it_was(tmp_path: Path, tiny_model: Path) -> None:
    # faults.md 131: less than 0.1 MB a step after the warm-up
    readings: list[tuple[int, dict[str, float]]] = []
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner(steps=STEPS, sampling={"group_size": 4, "max_new_tokens": 8}, checkpoint={"every_steps": 50})
        run.start_rollout("only", exit_when_finished=False)
        run.wait_steps(1, limit_s=600)
        for step in range(WARM_UP, STEPS - EVERY, EVERY):
            wait_for(f"step {step}", lambda step=step: len(run.metrics()) >= step, limit_s=900, every_s=0.02, guard=run.learner_must_live)  # type: ignore[misc]
            readings.append((len(run.metrics()), looked_at(run)))
        assert len(readings) == (STEPS - EVERY - WARM_UP) // EVERY
        throughout = set.intersection(*(set(seen) for _, seen in readings))
        slopes = {name: slope_per_h([step for step, _ in readings], [seen[name] for _, seen in readings]) / 3600 for name in sorted(throughout)}
        print(json.dumps({"mib_a_step": {name: round(slope, 4) for name, slope in slopes.items()}, "mib_at_last": {name: round(readings[-1][1][name], 1) for name in slopes}}))
        assert {name.partition(":")[0] for name in slopes} == {"reward", "learner", "only"} and any("learner.trainer" in name for name in slopes) and any("learner.gateway" in name for name in slopes)
        assert {name: slope for name, slope in slopes.items() if slope >= MOST_MIB_PER_STEP} == {}
