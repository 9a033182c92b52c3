"""The Python face: the file's names as keyword arguments, rewards that another process can find."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from deploy.demo import sorting
from deploy.trainer import scorer_path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return file


def test_keyword_arguments_are_the_fields_of_the_file(prompts: Path, tmp_path: Path) -> None:
    trainer = headrace.GRPOTrainer(
        model="some/model", prompts=prompts, reward=sorting.score, run_dir=tmp_path / "run",
        steps=7, sampling={"group_size": 4}, data={"template": "raw"}, rollout={"replicas": 2}, reward_server={"workers": 2},
    )
    run = trainer.run
    assert (run.learner.steps, run.learner.sampling.group_size, run.learner.data.template) == (7, 4, "raw")
    assert (run.rollout.replicas, run.rollout.model) == (2, "some/model")
    assert run.reward is not None
    assert (run.reward.workers, run.reward.scorers[0].use) == (2, "deploy.demo.sorting:score")


def test_an_unknown_keyword_is_told(prompts: Path) -> None:
    with pytest.raises(ValueError, match="GRPOTrainer: learner.stepz: unknown key"):
        headrace.GRPOTrainer(model="m", prompts=prompts, reward="last_number", stepz=1)


def test_a_reward_that_cannot_be_imported_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="move the function to the top level of a module"):
        scorer_path(lambda prompt, completion, fields: 1.0)


def test_a_reward_hidden_by_another_object_is_refused() -> None:
    def score(prompt: str, completion: str, fields: dict[str, str]) -> float:
        return 1.0

    score.__module__, score.__qualname__ = "deploy.demo.sorting", "score"
    with pytest.raises(ValueError, match="names another object"):
        scorer_path(score)
