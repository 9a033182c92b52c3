"""Whole runs whose learner is stopped, starved of disk, crashed, moved to another world size: nothing is lost, nothing trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.system.harness import Run, Service, pids_running, process_tree, running, wait_for
from tests.system.records import account_by_steps, journal_records, newest_step, tensors_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMES = ("time_s", "seconds", "push", "save", "version", "lineage", "trainer_idle_share", "trained_tokens_per_s", "generated_tokens_per_s", "checkpoint_failed")
FEED = ("gateway_wait_s", "replica_idle_share", "num_replicas", "leased_groups", "open_groups", "waiting_groups", "oldest_open_s", "generated_tokens")


def end_of(run: Run, name: str = "learner", limit_s: float = 120) -> int:
    return run.services[name].process.wait(limit_s)


def tell_to_stop(run: Run, number: int = signal.SIGTERM, *, whole: bool = False) -> None:
    """To the supervisor alone, as an orchestrator sends it, or to all of its processes, as a terminal or a scheduler does."""
    if whole:
        run.services["learner"].signal(number)
    else:
        os.kill(run.services["learner"].process.pid, number)


def surviving(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({line["step"]: line for line in lines}.values())


def trained_once(run: Run) -> list[list[str]]:
    """Groups by step of the surviving lineage, none of which is there twice."""
    by_step = [sorted(line["groups"]) for line in surviving(run.metrics())]
    groups = [group for step in by_step for group in step]
    assert len(groups) == len(set(groups)), "a group was trained twice"
    return by_step


def balances(run: Run) -> None:
    status = wait_for("a status", run.status, limit_s=30)
    assert status.num_leased == status.num_trained + sum(status.num_dropped.values()) + status.num_open


def test_told_to_stop_the_learner_cuts_leaves_with_0_and_goes_on_from_there_at_another_world_size(tmp_path: Path, tiny_model: Path) -> None:
    # faults.md 116: 2 ranks, then 1, then 2
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_rollout("only")
        last = 0
        for ranks, number, whole in ((2, signal.SIGTERM, False), (1, signal.SIGINT, True), (2, signal.SIGTERM, True)):
            run.start_learner(trainer={"ranks": ranks}, checkpoint={"every_steps": None, "keep": 9})
            run.wait_steps(last + 2)
            tell_to_stop(run, number, whole=whole)
            assert end_of(run) == 0, run.services["learner"].tail()
            steps = [line["step"] for line in run.metrics()]
            assert steps == list(range(1, len(steps) + 1)), "every step was trained exactly once"
            assert newest_step(run.run_dir) == steps[-1]
            last = steps[-1]
        trained_once(run)
        counters = {name: int(value) for name, value in tensors_of(run.run_dir / "checkpoints" / f"step-{last:06d}").items() if name.startswith("counters.")}
        assert counters["counters.policy_step"] == last == counters["counters.updates"]


def test_told_to_stop_while_no_batch_comes_the_learner_cuts_what_it_has(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_learner(trainer={"ranks": 2})
        wait_for("the first version", lambda: (s := run.status()) and s.newest_version, limit_s=90, guard=run.learner_must_live)
        tell_to_stop(run, whole=True)
        assert end_of(run, limit_s=40) == 0
        assert newest_step(run.run_dir) == 0


def test_a_disk_that_refuses_one_rank_costs_the_save_and_the_learner_that_leaves_then_says_so(tmp_path: Path, tiny_model: Path) -> None:
    # faults.md 111: ENOSPC on one rank only, before the other is in a collective of the save
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_rollout("only")
        fault = {"HEADRACE_FAULT": "trainer_save=full", "HEADRACE_FAULT_ONCE": str(tmp_path / "fired")}
        learner = run.start_learner(fault, trainer={"ranks": 2}, checkpoint={"every_steps": None})
        run.wait_steps(2)
        tell_to_stop(run)
        assert end_of(run, limit_s=60) == 1, learner.tail()
        last = learner.tail().strip().splitlines()[-1]
        assert last.startswith("headrace: told to stop, and left without a cut of the last step"), last
        assert "no space left, as planted at trainer_save" in (run.run_dir / "logs" / "trainer-0.log").read_text()
        assert newest_step(run.run_dir) == -1
        before = run.metrics()[-1]["step"]
        run.start_learner()  # the same command: everything again, from the journal
        reach(run, before + 2)
        trained_once(run)
        balances(run)


def test_a_run_whose_prompts_are_used_up_ends_with_a_cut_of_its_last_step_and_leaves_no_memory(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"count from {i}: ", "answer": "1"}) + "\n" for i in range(6)))
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_rollout("only")
        learner = run.start_learner(trainer={"ranks": 2}, checkpoint={"every_steps": None}, data={"epochs": 1})
        assert end_of(run) == 0, learner.tail()
        assert newest_step(run.run_dir) == run.metrics()[-1]["step"] == 3  # two of six prompts a step
        assert not Path(f"/dev/shm/headrace-{(run.run_dir / 'run_id').read_text().strip()}").exists()


def test_a_full_disk_costs_saves_and_then_waits_for_room_but_no_training_is_lost(tmp_path: Path, tiny_model: Path) -> None:
    # faults.md 111, and DESIGN 9: saves fail, training goes on until the journal is full, an alarm says so, room ends it
    with running(tmp_path, tiny_model) as run:
        checkpoints = run.run_dir / "checkpoints"
        script = f'mkdir -p {checkpoints} && mount -t tmpfs -o size=6m none {checkpoints} && head -c 5500000 /dev/zero > {checkpoints}/filler && exec "$@"'
        run.start_reward()
        learner = run.start_learner(prefix=["unshare", "-rm", "sh", "-ec", script, "sh"], checkpoint={"every_steps": 2, "keep": 1}, journal={"max_groups": 20})
        run.start_rollout("only")
        inside = Path(f"/proc/{learner.process.pid}/root") / str(checkpoints).lstrip("/")
        status = wait_for("the alarm", lambda: s if (s := run.status()) and s.alarm else None, limit_s=200, guard=run.learner_must_live)
        assert "the journal is full" in status.alarm and str(checkpoints) in status.alarm
        lines = run.metrics()
        assert lines[-1]["step"] >= 6 and lines[-1]["checkpoint_failed"] >= 2, "training went on beside failing saves"
        assert not list(inside.glob("step-*/cut.json"))
        (inside / "filler").unlink()
        wait_for("training beyond", lambda: run.metrics()[-1]["step"] >= lines[-1]["step"] + 4, limit_s=120, guard=run.learner_must_live)
        assert not (run.status() or status).alarm
        assert list(inside.glob("step-*/cut.json"))
        left = {path.name for path in inside.iterdir()}
        assert len(left) <= 2, f"failed saves are cleaned up: {left}"
        trained_once(run)
        balances(run)


def test_what_was_submitted_since_the_cut_is_trained_and_not_generated_again(tmp_path: Path, tiny_model: Path) -> None:
    # faults.md 113
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(steps=14, staleness={"max_staleness": 2}, checkpoint={"every_steps": 4, "keep": 99}, trainer={"ranks": 2})
        replica = run.start_rollout("only")
        reach(run, 7)  # three past the cut
        replica_pid = replica.process.pid
        os.kill(pids_running("learner.trainer", learner.process.pid)[1], signal.SIGKILL)
        assert end_of(run, limit_s=240) == 0, learner.tail()
        records = journal_records(run.run_dir)
        back = next(i for i, record in enumerate(records) if record["type"] == "rolled_back")
        assert records[back]["step"] == 4
        samples: dict[int, set[int]] = {}
        for record in records[:back]:
            if record["type"] == "submitted":
                samples.setdefault(record["seq"], set()).add(record["sample_index"])
        finished = {seq for seq, have in samples.items() if len(have) == 4}
        leased_later = {record["seq"] for record in records[back:] if record["type"] in ("opened", "leased_again")}
        assert len(finished & leased_later) == 0, "requests for finished groups"
        planned_later = {seq for record in records[back:] if record["type"] == "planned" for seq in record["groups"]}
        trained_before = {seq for record in records[:back] if record["type"] == "planned" and record["step"] < 4 for seq in record["groups"]}
        assert finished <= planned_later | trained_before, "what was finished is trained"
        submitted_between = [record["seq"] for record in records[back:] if record["type"] == "submitted"]
        assert submitted_between, "the replica went on"
        assert replica.process.wait(60) == 0 and replica.process.pid == replica_pid
        assert len(trained_once(run)) == 14


def test_ranks_that_torchrun_keeps_come_back_from_the_cut_and_finish(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        run.start_learner(arguments=["--gateway-only"], steps=12, checkpoint={"every_steps": 3})
        run.start_rollout("only")
        run.services["learner"].must_live()
        ranks = torchrun(run)
        wait_for("step 4", lambda: run.metrics() and run.metrics()[-1]["step"] >= 4, limit_s=180, guard=ranks.must_live)
        os.kill(ranks_of(ranks)[0], signal.SIGKILL)
        wait_for("the ranks to come back", lambda: run.metrics()[-1]["lineage"] == 1, limit_s=120, guard=ranks.must_live)
        # torchrun itself dies: its ranks do not outlive it, and the same command goes on.
        left = ranks_of(ranks)
        os.kill(ranks.process.pid, signal.SIGKILL)
        wait_for("the ranks to die with torchrun", lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), limit_s=10)
        ranks = torchrun(run)
        assert ranks.process.wait(240) == 0, ranks.tail()
        assert end_of(run, limit_s=60) == 0
        lines = run.metrics()
        assert surviving(lines)[-1]["step"] == 12 and lines[-1]["lineage"] == 2
        trained_once(run)


def torchrun(run: Run) -> Service:
    command = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2 -m learner.trainer"
    return run.start("ranks", command, run.learner_config, {}, address_file=False)


def ranks_of(service: Service) -> list[int]:
    pids = [pid for pid in process_tree(service.process.pid) if pid != service.process.pid and b"learner.trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(pids) == 2
    return pids


def whole_machine_dies(run: Run) -> None:
    for service in run.services.values():
        service.signal(signal.SIGKILL)
    for service in run.services.values():
        service.process.wait(10)


def start_all(run: Run, **settings: Any) -> None:
    run.start_reward()
    run.start_learner(**settings)
    run.start_rollout("only")


def reach(run: Run, step: int) -> None:
    wait_for(f"step {step}", lambda: run.metrics() and run.metrics()[-1]["step"] >= step, limit_s=180, every_s=0.02, guard=run.learner_must_live)


def plain(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without clocks, version numbers and what the replicas did meanwhile."""
    return [{name: value for name, value in line.items() if name not in TIMES and name not in FEED} for line in surviving(lines)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_and_resumed_equals_unbroken(tmp_path: Path, tiny_model: Path, staleness: int) -> None:
    settings: dict[str, Any] = {"steps": 7, "staleness": {"max_staleness": staleness}, "checkpoint": {"every_steps": 2, "keep": 9}, "trainer": {"ranks": 2}}
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "unbroken", tiny_model) as unbroken:
        start_all(unbroken, **settings)
        assert end_of(unbroken, limit_s=200) == 0, unbroken.services["learner"].tail()
    with running(tmp_path / "killed", tiny_model) as killed:
        start_all(killed, **settings)
        for step in (3, 5):
            reach(killed, step)
            whole_machine_dies(killed)
            start_all(killed)  # one command each; everything else is in the folder
        assert end_of(killed, limit_s=200) == 0, killed.services["learner"].tail()
    assert len(killed.metrics()) > 7, "nothing was rolled back: the kills came right after cuts"
    assert trained_once(unbroken) == trained_once(killed)
    if staleness > 0:
        return
    steps_of = [{line["version"]: line["step"] for line in run.metrics()} | republished(run) for run in (unbroken, killed)]
    for one, other in zip(plain(unbroken.metrics()), plain(killed.metrics()), strict=True):
        assert one == other, json.dumps([one, other], indent=1)
    assert account_by_steps(unbroken.run_dir, steps_of[0]) == account_by_steps(killed.run_dir, steps_of[1])
    left, right = (tensors_of(run.run_dir / "checkpoints" / "step-000007") for run in (unbroken, killed))
    assert left.keys() == right.keys() and len(left) > 50
    for name in left:
        assert left[name].numpy().tobytes() == right[name].numpy().tobytes(), name


def republished(run: Run) -> dict[int, int]:
    """Versions that have no line of metrics: what each life began with. From the journal, as far as it goes."""
    return {record["version"]: record["step"] for record in journal_records(run.run_dir) if record["type"] == "published"}


def test_the_command_that_lists_and_verifies_reads_a_real_run(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model) as run:
        start_all(run, steps=4, trainer={"ranks": 2}, checkpoint={"every_steps": 2, "keep": 1, "keep_best": {"metric": "step", "mode": "min"}})
        assert end_of(run) == 0
    for words in (["list"], ["verify"]):
        ran = subprocess.run([sys.executable, "-m", "deploy.cli", "checkpoint", *words, str(run.run_dir)], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
        assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000004"]  # the best is the lowest step here
    out = tmp_path / "out"
    ran = subprocess.run([sys.executable, "-m", "deploy.cli", "export", str(run.run_dir), str(out)], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    exported, written = load_file(out / "model.safetensors"), load_file(run.run_dir / "model" / "model.safetensors")
    assert exported.keys() == written.keys() and all(exported[name].equal(written[name]) for name in written)
