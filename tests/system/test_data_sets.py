"""A whole run of two data sets, each with its own algorithm and group size, through real processes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from deploy.audit.program import audit
from tests.system.harness import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_two_data_sets_train_side_by_side_and_the_account_is_clean(tmp_path: Path, tiny_model: Path) -> None:
    for name, num in (("one", 12), ("two", 12)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name} {n} =", "answer": n}) + "\n" for n in range(num)))
    sets = {
        "one": {"prompts": str(tmp_path / "one.jsonl"), "weight": 2},
        "two": {"prompts": str(tmp_path / "two.jsonl"), "group_size": 2, "algorithm": {"name": "rloo"}, "curriculum": {"kind": "band"}, "replay": {"requeue": ["unusable"]}},
    }
    with running(tmp_path, tiny_model) as run:
        run.start_reward()
        learner = run.start_learner(steps=6, groups_per_step=3, data={"prompts": None, "template": "raw", "sets": sets}, sampling={"group_size": 4, "max_new_tokens": 6})
        run.start_rollout("only")
        assert learner.process.wait(360) == 0, learner.tail()
        lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        given = Counter({name: sum(line["data_sets"].get(name, {}).get("num_groups", 0) for line in lines) for name in ("one", "two")})
        assert len(lines) == 6 and given == {"one": 12, "two": 6}  # two of three, exactly
        assert all(line["num_samples"] == 4 * line["data_sets"]["one"]["num_groups"] + 2 * line["data_sets"]["two"]["num_groups"] for line in lines)
        assert [str(finding) for finding in audit(run.run_dir).findings.found] == []
