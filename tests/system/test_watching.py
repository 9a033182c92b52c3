"""A real Prometheus scrapes a launched run: a healthy one fires no alarm, three planted causes fire theirs, there and in the gateway, and
the diagnosis names the cause. The run goes on under all of it, and its audit is clean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.watch.alarms import ALARMS
from protos import faultpoints
from tests.prometheus_server import PrometheusServer
from tests.system.harness import ROOT, wait_for
from tests.system.launched import Launched, launched, run_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
LIMIT_S = 360.0


def both_find(run: Launched, prometheus: PrometheusServer, alarm: str, verdict: str, since_s: float) -> str:
    """Until the gateway and Prometheus fire the alarm and a diagnosis has been made; its text."""
    wait_for(f"{alarm} in the gateway", lambda: alarm in run.firing(), limit_s=LIMIT_S, guard=run.must_live)
    wait_for(f"{alarm} in Prometheus", lambda: alarm in prometheus.firing(), limit_s=LIMIT_S, guard=run.must_live)

    def told() -> str | None:
        text = run.diagnosis_of(alarm, after_s=since_s)
        return text if text is not None and text.startswith(f"Verdict: {verdict}\n") else None

    return wait_for(f"a diagnosis of {alarm} with the verdict {verdict!r}", told, limit_s=LIMIT_S, guard=run.must_live)


def all_over(run: Launched, prometheus: PrometheusServer) -> None:
    wait_for("the end of all alarms", lambda: not run.firing() and not prometheus.firing(), limit_s=LIMIT_S, guard=run.must_live)


def stays_well(run: Launched, prometheus: PrometheusServer, seconds: float) -> None:
    """Longer than any alarm waits."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        run.must_live()
        assert not run.firing() and not prometheus.firing(), (run.alarms(), prometheus.firing())
        time.sleep(1)


def test_each_planted_cause_fires_its_alarm_and_is_named_and_a_healthy_run_fires_none(tiny_model: Path, tmp_path: Path) -> None:
    faults, slow_reward = tmp_path / "faults", tmp_path / "slow_reward"
    with launched(run_file(tmp_path, tiny_model), HEADRACE_FAULT_FILE=str(faults)) as run:
        run.wait_steps(3, limit_s=500)  # on a busy machine the imports alone take minutes
        with PrometheusServer(run.run_dir / "prometheus.yml", tmp_path / "prometheus") as prometheus:
            wait_for("a scrape of every service", lambda: set(prometheus.targets().values()) == {"up"} and len(prometheus.targets()) == 4, limit_s=60)
            stays_well(run, prometheus, 45)
            print(f"healthy: {len(run.steps())} steps, no alarm")
            planted: list[tuple[str, str, Callable[[], None], Callable[[], None]]] = [
                ("HeadraceRewardSlow", "reward-bound", slow_reward.touch, slow_reward.unlink),
                ("HeadraceDiskSlow", "disk", lambda: faultpoints.plant(faults, "before_fsync=slow:1.5"), faults.unlink),
                ("HeadraceReplicaStalled", "stalled replica rollout-1", lambda: os.kill(run.pid_of("rollout-1"), signal.SIGSTOP), lambda: os.kill(run.pid_of("rollout-1"), signal.SIGCONT)),
            ]
            for alarm, verdict, plant, mend in planted:
                since_s = time.time()
                plant()
                try:
                    text = both_find(run, prometheus, alarm, verdict, since_s)
                finally:
                    mend()
                print(f"{alarm} after {time.time() - since_s:.0f} s:\n{text[:600]}")
                all_over(run, prometheus)
                run.wait_steps(2)
            fired = {line["alarm"] for line in run.alarms()}
            assert {alarm for alarm, *_ in planted} <= fired <= set(ALARMS)
            the_stacks_name_every_process(run)
    audit = subprocess.run([sys.executable, "-m", "deploy.cli", "audit", str(run.run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def the_stacks_name_every_process(run: Launched) -> None:
    """Gateway, supervisor, rank, replicas, reward server and its scorer process: what each was doing, also in the stopped one's case."""
    stalled = next(folder for folder in (run.run_dir / "diagnosis").glob("*") if (folder / "verdict.txt").read_text().startswith("Verdict: stalled replica rollout-1"))
    stacks = {file.name: file.read_text() for file in (stalled / "stacks").iterdir()}
    for name, frame in (("learner.gateway", "lookout"), ("learner.trainer", "loop.py"), ("reward_server.worker", "worker.py"), ("reward_server-reward-0", "reward_server"), ("rollout_server-rollout-0", "rollout_server"), ("learner-learner", "learner/__main__.py")):
        found = [text for file, text in stacks.items() if file.startswith(name)]
        assert found, (name, sorted(stacks))
        assert any(frame in text and "most recent call first" in text for text in found), (name, found[0][:2000])
    (stopped,) = [text for file, text in stacks.items() if file.startswith("rollout_server-rollout-1")]
    assert "T (stopped)" in stopped and "has not answered" in stopped
    assert {log.name for log in (stalled / "logs").iterdir()} >= {"gateway.log", "trainer-0.log", "rollout-0.log", "rollout-1.log", "reward-0.log"}
