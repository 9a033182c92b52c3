"""A real run with held-out prompts beside training: what it writes, that its audit is clean, and that each wrong planted in a copy is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.audit.program import audit
from deploy.progress import evaluations, read_all, surviving
from tests.deploy.audit.tampering import Item, copied, entries_of, forged, said
from tests.system.harness import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Three steps with the small engine; the policies of steps 0, 2 and 3 are asked five held-out prompts, greedily and twice at random."""
    folder = tmp_path_factory.mktemp("evaluated")
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{n} + {n} =", "answer": str(2 * n)}) + "\n" for n in range(40, 45)))
    with running(folder, tiny_model) as run:
        run.start_reward()
        asked = {"prompts": str(held_out), "every_steps": 2, "samples": 2, "k": [2]}
        learner = run.start_learner(steps=3, sampling={"group_size": 2, "max_new_tokens": 6}, evaluation=asked)
        run.start_rollout("only")
        assert learner.process.wait(120) == 0, learner.tail()
        return run.run_dir


def test_every_due_policy_is_scored_and_training_is_what_it_was_without(run_dir: Path) -> None:
    lines = read_all(run_dir / "metrics.jsonl")
    assert [line["step"] for line in surviving(lines)] == [1, 2, 3] and surviving(lines)[-1]["trained_groups"] == 4  # before the last of three steps of two
    found = evaluations(lines)
    assert [found[0]["step"], found[-1]["step"]] == [0, 3]
    for line in found:
        own = line["evaluation"]
        assert (own["ended"], own["wanted"], own["leased"], own["scored"], own["num_prompts"]) == ("complete", 15, 15, 15, 5)
        assert own["greedy"]["num_prompts"] == own["sampled"]["num_prompts"] == own["pass_at_k"]["2"]["num_prompts"] == 5
    assert set(found[-1]["evaluation"]["tokens_by_version"]) == {"4"}  # the last policy is not trained on, so every answer is its own
    kept = [line for line in read_all(run_dir / "samples.jsonl") if line["group_id"].startswith("e")]
    assert {line["step"] for line in kept} == {line["step"] for line in found}


def test_its_audit_is_clean_and_has_looked(run_dir: Path) -> None:
    findings = audit(run_dir).findings
    assert findings.found == [] and findings.checked["an evaluation's samples balance"] >= 4


def of_type(items: list[Item], kind: str) -> list[dict[str, Any]]:
    return [record for record, _ in items if record["type"] == f"evaluation_{kind}"]


def an_answer_twice(items: list[Item]) -> list[Item]:
    place = next(index for index, (record, _) in enumerate(items) if record["type"] == "evaluation_answered")
    return [*items[: place + 1], items[place], *items[place + 1 :]]


def an_answer_gone(items: list[Item]) -> list[Item]:
    place = next(index for index, (record, _) in enumerate(items) if record["type"] == "evaluation_answered")
    return items[:place] + items[place + 1 :]


def an_older_version(items: list[Item]) -> list[Item]:
    of_type(items, "answered")[-1]["answer"][4] = [[1, 6]]
    return items


def lent_never(items: list[Item]) -> list[Item]:
    place = next(index for index, (record, _) in enumerate(items) if record["type"] == "evaluation_lent")
    return items[:place] + items[place + 1 :]


def another_number(items: list[Item]) -> list[Item]:
    for record in of_type(items, "begun"):
        record["serial"] += 1
    return items


@pytest.mark.parametrize(("change", "rule"), [
    (an_answer_twice, "an evaluation's sample is booked once"), (an_answer_gone, "an evaluation's samples balance: journal"), (an_older_version, "an evaluation is drawn from the version"),
    (lent_never, "an evaluation's sample is booked once"), (another_number, "evaluations run one after another"),
])  # fmt: skip
def test_a_wrong_record_is_found(run_dir: Path, tmp_path: Path, change: Any, rule: str) -> None:
    assert forged(run_dir, tmp_path, lambda items: items) == []
    (tmp_path / "forged").mkdir()
    found = forged(run_dir, tmp_path / "forged", change)
    assert any(line.startswith(rule) for line in found), found


@pytest.mark.parametrize(("change", "rule"), [({"scored": 14}, "an evaluation's samples balance: metrics.jsonl line"), ({"scored": 14, "lost": 1}, "evaluations in metrics match the journal")])
def test_a_line_that_says_other_than_the_journal_is_found(run_dir: Path, tmp_path: Path, change: dict[str, int], rule: str) -> None:
    run = copied(run_dir, tmp_path)
    lines = read_all(run / "metrics.jsonl")
    next(line for line in lines if "evaluation" in line)["evaluation"].update(change)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any(line.startswith(rule) for line in said(run))
    assert len(entries_of(run)) > 0
