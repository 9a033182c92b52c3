"""Replicas come, go, stall and die while a run goes on (small engine; real gRPC, processes and pushes)."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from tests.system.harness import Run, running, wait_for

pytestmark = pytest.mark.timeout(240)


def loaded(run: Run, name: str, at_least: int) -> learner_pb2.GetStatusResponse.Replica | None:
    replica = run.replica(name)
    serving = replica is not None and replica.attending and replica.state == rollout_pb2.REPLICA_STATE_SERVING
    return replica if replica is not None and serving and replica.loaded_version >= at_least else None


def newest(run: Run) -> int:
    status = run.status()
    return status.newest_version if status else 0


def balanced(status: learner_pb2.GetStatusResponse) -> bool:
    return status.num_leased == status.num_trained + sum(status.num_dropped.values()) + status.num_open


@pytest.mark.slow
def test_a_replica_stopped_inside_a_push_does_not_keep_the_other_from_committing(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner()
        run.start_rollout("steady")
        run.start_rollout("stalled", env={"HEADRACE_FAULT": "receive_bucket=stop@8"}, max_num_seqs=8)
        stopped = run.services["stalled"]
        pid = stopped.process.pid
        wait_for("the replica to stop itself inside a push", lambda: "T" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0], limit_s=60)
        version, since = newest(run), time.monotonic()
        wait_for("the steady replica to load the version of the broken push", lambda: loaded(run, "steady", version), limit_s=20)
        assert time.monotonic() - since < 20, "the push deadline is 15 s"
        steps = len(run.metrics())
        run.wait_steps(steps + 2)
        stopped.signal(signal.SIGCONT)
        now = newest(run)
        wait_for("the stalled replica to recover", lambda: loaded(run, "stalled", now), limit_s=40)
        status = run.status()
        assert status is not None
        assert balanced(status)


@pytest.mark.slow
def test_a_replica_sigkilled_mid_run_costs_its_unfinished_tokens_and_not_the_run(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner()
        run.start_rollout("first")
        run.start_rollout("second")
        run.wait_steps(2)
        run.services["first"].kill()
        run.wait_steps(len(run.metrics()) + 4)
        status = run.status()
        assert status is not None
        assert balanced(status)
        assert not any(r.attending for r in status.replicas if r.replica_id == "first")


@pytest.mark.slow
def test_a_second_replica_joins_mid_run_and_contributes(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner()
        run.start_rollout("first")
        run.wait_steps(2)
        run.start_rollout("second")
        joined = wait_for("the second replica to load a version", lambda: loaded(run, "second", 1), limit_s=60)
        run.wait_steps(len(run.metrics()) + 4)

        def contributes() -> bool:
            now = run.replica("second")
            return now is not None and now.num_tokens > joined.num_tokens and now.loaded_version > joined.loaded_version

        wait_for("tokens of the second replica and a later version on it", contributes, limit_s=60, guard=run.learner_must_live)


def test_the_sole_replica_killed_and_restarted_between_pushes_is_back_within_30_s(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner()
        run.start_rollout("sole")
        run.wait_steps(2)
        run.services["sole"].kill()
        steps = len(run.metrics())
        time.sleep(1)
        since = time.monotonic()
        run.start_rollout("sole")
        run.wait_steps(steps + 2, limit_s=30)
        assert time.monotonic() - since < 30


def test_a_replica_of_another_run_is_refused_and_leaves_with_both_run_ids_in_one_line(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner()
        run.start_rollout("ours")
        run.wait_steps(1)
        stranger = run.start_rollout("stranger", run_id="another-run")
        stranger.process.wait(60)
        assert stranger.process.returncode == 2
        line = stranger.tail().strip().splitlines()[-1]
        status = run.status()
        assert status is not None
        assert line.startswith("headrace: ")
        assert "another-run" in line
        assert status.run_id in line
        assert not any(r.replica_id == "stranger" and r.attending for r in status.replicas)
        run.wait_steps(len(run.metrics()) + 1)


@pytest.mark.slow
def test_a_push_that_fails_midway_leaves_the_old_version_serving_and_the_replica_recovers(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner()
        run.start_rollout("only", env={"HEADRACE_FAULT": "receive_bucket=raise@8", "HEADRACE_FAULT_ONCE": str(tmp_path / "fired")})
        wait_for("the fault inside a push", (tmp_path / "fired").exists, limit_s=60)
        replica = run.replica("only")
        assert replica is not None
        assert replica.state in (rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_WAITING), "nothing was applied, so it is not stale"
        version = newest(run)
        wait_for("a later version on the replica", lambda: loaded(run, "only", version), limit_s=40)
        run.wait_steps(len(run.metrics()) + 2)
