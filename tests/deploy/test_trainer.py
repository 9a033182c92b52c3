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


def test_ppo_is_sized_by_four_numbers_and_takes_every_other_setting_on_top() -> None:
    # 64 samples in groups of 4; 1024 tokens, half for either; 8 GPUs: 4 ranks and 4 replicas
    run = headrace.PPOTrainer(model_name="some/model", num_gpus=8, batch_size=64, sequence_length=1024, steps=7, optimizer={"epochs": 2}, trainer={"row_tokens": 4096}).run
    assert (run.model, run.learner.algorithm.name, run.learner.steps, run.learner.optimizer.epochs) == ("some/model", "ppo", 7, 2)
    assert (run.learner.groups_per_step, run.learner.sampling.group_size, run.learner.sampling.max_new_tokens, run.learner.data.max_prompt_tokens) == (16, 4, 512, 512)
    assert (run.learner.trainer.ranks, run.learner.trainer.device, run.learner.trainer.row_tokens, run.rollout.replicas) == (4, "cuda", 4096, 4)
    assert run.placement.learner_gpus == (0, 1, 2, 3) and run.placement.rollout_gpus == ((4,), (5,), (6,), (7,))
    assert headrace.PPOTrainer(model_name="m", num_gpus=1).run.learner.push.transport == "auto"  # CUDA IPC on one GPU
    cpu = headrace.PPOTrainer(model_name="m", batch_size=6, sequence_length=64, algorithm={"kl": None}).run
    assert (cpu.learner.trainer.device, cpu.learner.groups_per_step, cpu.learner.filter.min_usable, cpu.learner.algorithm.kl) == ("cpu", 6, 1, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompts": "some.jsonl"}, "give both, or neither"), ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"), ({"num_gpus": -1}, "num_gpus=-1"),
        ({"batch_size": 6, "sampling": {"group_size": 4}}, "batch_size=6 is no multiple of sampling.group_size=4"), ({"trainer": 3}, "trainer=3 must be a mapping"),
    ],
)  # fmt: skip
def test_ppo_refuses_numbers_that_do_not_fit(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        headrace.PPOTrainer(**{"model_name": "m", **changes})  # type: ignore[arg-type]


def test_scorers_named_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="both name scorers"):
        headrace.GRPOTrainer(model="m", prompts="p.jsonl", reward="last_number", reward_server={"scorers": [{"name": "x", "use": "exact"}], "workers": 2})
