"""A whole run in which 200 environments hang, raise, die, answer nonsense or leak: it goes on, and counts them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from deploy.audit.program import audit
from rollout_server.environments.host import IDLE_PROCESSES
from rollout_server.environments.process import MARK
from tests.system.harness import running, wait_for
from tests.system.records import journal_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GROUP_SIZE = 4
PLANTED = {"hang": 10, "raise": 10, "exit": 10, "garbage": 10, "leak_children": 10}  # records; each is played GROUP_SIZE times: 200 environments
REASONS = {"hang": "environment_timeout", "raise": "environment_error", "exit": "environment_died", "garbage": "environment_bad_answer"}


def marked() -> set[int]:
    """Living processes of environments that were started from here."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if f"{MARK}=".encode() in environ and f"STARTED_BY={os.getpid()}".encode() in environ:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_two_hundred_broken_environments_do_not_stop_a_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTED_BY", str(os.getpid()))
    before = marked()
    hows = [how for how, count in PLANTED.items() for _ in range(count)]
    records = [{"prompt": f"go {place}: ", "how": hows[place // 2] if place % 2 and place // 2 < len(hows) else "good"} for place in range(2 * len(hows))]
    prompts = tmp_path / "broken.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    environment = {
        "name": "bad", "use": "tests.rollout_server.environments.plugins:Bad", "template": "raw", "max_turn_tokens": 3, "step_timeout_s": 2, "reset_timeout_s": 20,
        "load_timeout_s": 120, "max_sessions": 12,
    }  # fmt: skip
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(
            data={"prompts": str(prompts), "template": "raw", "epochs": 1}, sampling={"group_size": GROUP_SIZE, "max_new_tokens": 64}, groups_per_step=4, filter={"max_consecutive_drops": 100, "min_usable": 1},  # a group is not given up before all four were played
        )  # fmt: skip
        rollout = run.start_rollout("only", environments=[environment], exit_when_finished=False, max_num_seqs=32)
        run.wait_steps(1, limit_s=600)
        wait_for("an environment to be played", lambda: bool(marked()), limit_s=120)
        early = descriptors(rollout.process.pid)
        assert learner.process.wait(900) == 0, learner.tail()
        found = Counter(record["facts"]["unusable_reason"] for record in journal_records(run.run_dir) if record["type"] == "submitted")
        print(json.dumps({"samples": dict(found), "steps": len(run.metrics())}))
        assert {reason: found[reason] for reason in REASONS.values()} == {REASONS[how]: PLANTED[how] * GROUP_SIZE for how in REASONS}
        assert set(found) == {"", *REASONS.values()} and found[""] == (len(records) - sum(PLANTED[how] for how in REASONS)) * GROUP_SIZE
        dropped = run.metrics()[-1]["dropped"]
        assert dropped == {"unusable": sum(PLANTED[how] for how in REASONS)}  # whole groups; the good ones and those that leaked were trained
        assert rollout.log.read_text(errors="replace").count("left descriptors, threads or processes behind") == PLANTED["leak_children"] * GROUP_SIZE
        wait_for("the environments to be idle", lambda: len(marked() - before) <= IDLE_PROCESSES, limit_s=30)
        assert descriptors(rollout.process.pid) <= early + 2 * IDLE_PROCESSES
        assert [str(finding) for finding in audit(run.run_dir).findings.found] == []
    end = time.monotonic() + 20
    while marked() - before and time.monotonic() < end:
        time.sleep(0.1)
    assert not marked() - before

