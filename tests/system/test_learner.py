"""The learner's own processes die: versions are never used twice, nothing is lost or trained twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.system.harness import Run, pids_running, running, wait_for

pytestmark = pytest.mark.timeout(240)


def trained_groups(run: Run) -> list[tuple[int, list[str]]]:
    """(policy step, group ids) of each line of metrics.jsonl, in order of writing."""
    return [(line["step"], line["groups"]) for line in run.metrics()]


@pytest.mark.slow
def test_the_trainer_killed_two_steps_past_a_cut_uses_no_version_twice(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(checkpoint={"every_steps": 4}, trainer={"ranks": 2})
        run.start_rollout("only")
        wait_for("a cut at step 4", lambda: (run.run_dir / "checkpoints" / "step-000004" / "cut.json").exists(), limit_s=120, guard=run.learner_must_live)
        wait_for("two steps past the cut", lambda: run.metrics()[-1]["step"] >= 6 and run.metrics()[-1]["step"] < 8, limit_s=60)
        before = run.metrics()
        os.kill(pids_running("learner.trainer", learner.process.pid)[0], signal.SIGKILL)
        wait_for("training past the old steps", lambda: len(run.metrics()) > len(before) and run.metrics()[-1]["step"] >= 8, limit_s=120, guard=run.learner_must_live)
        lines = run.metrics()
        versions = [line["version"] for line in lines]
        assert versions == sorted(set(versions)), "published versions strictly rise over the restart"
        survived = surviving(lines)
        groups = [group for line in survived for group in line["groups"]]
        assert len(groups) == len(set(groups)), "no group is trained twice in the surviving lineage"
        status = run.status()
        assert status is not None
        assert status.num_leased == status.num_trained + sum(status.num_dropped.values()) + status.num_open
        assert status.lineage == 1, "one rollback"


def surviving(lines: list[dict]) -> list[dict]:
    """The lines of steps that were not rolled back: the last one written of each step."""
    return list({line["step"]: line for line in lines}.values())


def test_the_gateway_killed_between_fsync_and_receipt_loses_nothing_and_takes_nothing_twice(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner(env={"HEADRACE_FAULT": "after_fsync_before_receipt=kill@5", "HEADRACE_FAULT_ONCE": str(tmp_path / "fired")})
        run.start_rollout("only")
        wait_for("the gateway to kill itself", (tmp_path / "fired").exists, limit_s=60)
        run.wait_steps(5)
        groups = [group for line in surviving(run.metrics()) for group in line["groups"]]
        assert len(groups) == len(set(groups))
        status = run.status()
        assert status is not None
        assert status.num_leased == status.num_trained + sum(status.num_dropped.values()) + status.num_open
        assert status.lineage == 0, "the trainers went on beside the restarted gateway"


def test_a_finished_run_ends_every_service_with_0_and_leaves_a_loadable_model(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(steps=3)
        replica = run.start_rollout("only")
        learner.process.wait(120)
        assert learner.process.returncode == 0
        replica.process.wait(30)
        assert replica.process.returncode == 0
        assert (run.run_dir / "model" / "config.json").exists()
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_started_again_resumes_from_its_last_cut(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(steps=50)
        run.start_rollout("only")
        run.wait_steps(5)
        learner.kill()
        before = run.metrics()
        run.start_learner(steps=len(before) + 4)
        run.services["learner"].process.wait(120)
        lines = run.metrics()
        assert run.services["learner"].process.returncode == 0, run.services["learner"].tail()
        assert surviving(lines)[-1]["step"] == len(before) + 4
        versions = [line["version"] for line in lines]
        assert versions == sorted(set(versions))
