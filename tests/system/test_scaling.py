"""A third replica is started by load and stopped again, on either backend (small engine; everything else is real).

Load is made by the shape of the run: an engine that draws one sample at a time is slower than a trainer of a tiny model, so the learner idles. Then
a fault point makes each step of the trainer take eight seconds, so that it is the slower side and the replicas idle.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from deploy.audit.program import audit
from protos import faultpoints
from tests.system.harness import wait_for
from tests.system.test_ray import alive, content, launched, left_behind, steps_made

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_third_replica_is_started_by_load_and_stopped_again(tiny_model: Path, tmp_path: Path, backend: str) -> None:
    run = content(tmp_path, tiny_model, steps=2000, max_num_seqs=1, max_model_len=192, scale={"least": 2, "most": 3, "steps": 2})
    run["roles"]["rollout"] = {"node_group": "here", "parallelism": {"data": 3}}
    run["learner"]["sampling"]["max_new_tokens"] = 128
    if backend == "local":
        run["cluster"] = {"node_groups": [{"name": "here", "gpus_per_node": 0}]}
    fault = tmp_path / "fault"
    launcher, said = launched(tmp_path, run, backend=backend, env={faultpoints.FILE: str(fault)})
    run_dir = tmp_path / "run"
    try:
        wait_for("a third replica that serves", lambda: "rollout-2 is started: learner idle" in said.read_text() and "rollout-2 serves on" in said.read_text(), limit_s=250, guard=lambda: alive(launcher, said))
        faultpoints.plant(fault, "trainer_update=slow:8")
        wait_for("its stop", lambda: "rollout-2 is stopped: learner idle" in said.read_text(), limit_s=200, guard=lambda: alive(launcher, said))
        log = next((run_dir / "logs").glob("rollout-2.log"))
        wait_for("the end of its process", lambda: not any("rollout-2" in line and "deploy.cli" not in line for line in left_behind(run_dir)), limit_s=60)
        fault.unlink()
        assert log.stat().st_size and "rollout-2 died" not in said.read_text(), "a replica that is stopped is not one that died"
        now = steps_made(run_dir)
        wait_for("two more steps", lambda: steps_made(run_dir) >= now + 2, limit_s=60, guard=lambda: alive(launcher, said))
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(90) == 130, said.read_text()
    finally:
        launcher.kill()
    outcome = audit(run_dir)
    assert not outcome.findings.found, outcome.findings.found
