"""ReMax in the trainer: the greedy answer's reward reaches the advantages of its group and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.trainer.decode import Batch, checked_batch, decode_stats, decode_table
from learner.trainer.metrics import summary_of_batch
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.table import Entry, zero_signal_share
from learner.trainer.update import train_step
from protos.learner.v1alpha1 import feed_pb2
from tests.learner.trainer import rig
from tests.learner.trainer.fake_feed import table_row, trajectory
from tests.learner.trainer.gradients import whole
from tests.learner.trainer.test_table import entry

GREEDY = entry("g", 2, 0.25, num_completion_tokens=500, num_trained_tokens=500, truncated=True)
TABLE = [entry("g", 0, 1.0, baseline=GREEDY), entry("g", 1, 0.0, baseline=GREEDY)]


def remax(**more: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": "remax", **more})


def rows(*table: Entry, baseline: tuple[int, ...]) -> list[feed_pb2.TableRow]:
    made = [table_row(e) for e in table]
    for index in baseline:
        made[index].baseline = True
    return made


def test_the_greedy_answer_leaves_the_table_and_stands_in_the_entries_of_its_group() -> None:
    other = entry("h", 0, 0.5)
    table = decode_table(rows(entry("g", 0, 1.0), other, GREEDY, baseline=(2,)))
    assert [(e.id, e.baseline) for e in table] == [(("g", 0), GREEDY), (("h", 0), None)]


@pytest.mark.parametrize(("second", "words"), [(entry("g", 3, 1.0), "second baseline"), (entry("h", 3, 1.0, usable=False), "unusable baseline")])
def test_two_greedy_answers_or_one_without_a_reward_are_refused(second: Entry, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_table(rows(GREEDY, second, baseline=(0, 1)))


def test_each_sample_is_held_against_it_and_no_count_holds_it() -> None:
    # 1 - .25, 0 - .25; 20 tokens of two samples
    (made,) = make_objective(remax(), max_new_tokens=8).minibatches(TABLE, num=1)
    assert dict(made.advantages) == {("g", 0): 0.75, ("g", 1): -0.25}
    assert (made.counts.num_tokens, made.counts.num_sequences) == (20, 2)


def test_its_length_is_punished_as_theirs_is() -> None:
    # 10 of 12 tokens with a buffer of 4: (10 - 8) / 4 = .5 off; 12 of 12: 1 off. 1 - .5 - (.25 - 1) = 1.25, 0 - .5 + .75 = .25
    greedy = replace(GREEDY, num_completion_tokens=12, truncated=False)
    (made,) = make_objective(remax(overlong={"buffer_tokens": 4}), max_new_tokens=12).minibatches([replace(e, baseline=greedy) for e in TABLE], num=1)
    assert dict(made.advantages) == {("g", 0): 1.25, ("g", 1): 0.25}


def test_a_group_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="greedy_reward must be finite"):
        make_objective(remax(), max_new_tokens=8).minibatches([replace(e, baseline=None) for e in TABLE], num=1)


def test_metrics_are_those_of_the_samples_and_its_mean_has_a_name() -> None:
    summary = summary_of_batch(Batch(policy_step=0, table=tuple(TABLE), samples=(), stats=decode_stats(feed_pb2.FeedStats())))
    assert (summary["reward_mean"], summary["num_samples"], summary["completion_tokens_mean"], summary["truncated_share"], summary["trained_tokens"]) == (0.5, 2, 10.0, 0.0, 20)
    assert summary["baseline_reward_mean"] == 0.25
    plain = summary_of_batch(Batch(policy_step=0, table=(entry("g", 0, 1.0),), samples=(), stats=decode_stats(feed_pb2.FeedStats())))
    assert "baseline_reward_mean" not in plain


def test_a_group_has_signal_where_a_sample_differs_from_it() -> None:
    equal = [replace(e, reward=0.25) for e in TABLE]
    assert zero_signal_share([replace(e, reward=1.0) for e in TABLE]) == 0.0 and zero_signal_share(equal) == 1.0


def test_a_batch_with_greedy_answers_trains(tmp_path: Path) -> None:
    made = rig.samples(2, 3)
    table = [replace(e, reward=float(e.sample_index)) for e in rig.entries(made)]
    header = feed_pb2.BatchHeader(table=rows(*table, baseline=tuple(i for i, e in enumerate(table) if e.sample_index == 2)))
    batch = checked_batch(header, [trajectory(s) for s in made if s.sample_index < 2], rank=0)
    with rig.group(0, 1, tmp_path / "store") as mesh:
        policy = rig.policy(rig.gpt2(tmp_path / "gpt2"), mesh)
        before = {name: whole(p) for name, p in policy.causal_lm.named_parameters()}
        objective = make_objective(remax(), max_new_tokens=8)
        result = train_step(
            policy, Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-2)), batch.samples, objective.minibatches(batch.table, num=1), objective=objective,
            row_tokens=40, share_prefix=True,
        )  # fmt: skip
        assert result.sums["targets"] == sum(s.num_trained_tokens for s in made if s.sample_index < 2)  # advantages -2 and -1
        assert any(not torch.equal(before[name], whole(p)) for name, p in policy.causal_lm.named_parameters())
