"""Data sets of one step train each with its own algorithm, and a token weighs the same wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from learner.config import LearnerConfig, OptimizerConfig
from learner.trainer.objective import Objective, objective_of_run
from learner.trainer.shaping import shaping_of
from learner.trainer.table import Counts, Entry
from learner.trainer.update import train_step
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import Keeping

SETS: dict[str, Any] = {
    "a": {"prompts": "a.jsonl"},
    "b": {"prompts": "b.jsonl", "algorithm": {"name": "rloo"}},
    "c": {"prompts": "c.jsonl", "algorithm": {"advantage": {"kind": "group", "normalize": False}, "loss": {"kind": "kl_cov", "share": 0.3}, "kl": {"coefficient": 0.1, "gradient": "importance"}}},
}


def config(**changes: Any) -> LearnerConfig:
    values: dict[str, Any] = {"run_dir": "r", "model": "m", "data": {"sets": SETS}, "sampling": {"max_new_tokens": 8}}
    return LearnerConfig.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def table(names: Sequence[str]) -> list[Entry]:
    """Groups g0, g1, ... of four, of these data sets."""
    return [replace(entry, data_set=names[int(entry.group_id[1:])]) for entry in rig.entries(rig.samples(len(names), 4))]


def gradient(mesh: DeviceMesh, folder: Path, entries: list[Entry], objective: Objective, num_groups: int) -> tuple[dict[str, Tensor], Counts]:
    policy = rig.policy(folder, mesh, torch.float64)
    optimizer = Keeping(policy.causal_lm.named_parameters(), OptimizerConfig())
    (minibatch,) = objective.minibatches(entries, num=1)
    train_step(policy, optimizer, rig.samples(num_groups, 4), [minibatch], objective=objective, row_tokens=40, share_prefix=True)
    return optimizer.gradients, minibatch.counts


def test_the_gradient_of_a_mixed_step_is_that_of_its_sets_by_their_share_of_the_tokens(mesh: DeviceMesh, tmp_path: Path) -> None:
    """With N tokens in all and N_s of set s, and g_s the gradient of set s alone with its algorithm: the sum of N_s / N * g_s."""
    folder, names = rig.gpt2(tmp_path / "gpt2"), ["a", "b", "a", "c", "b", "c"]
    objective, entries = objective_of_run(config()), table(names)
    mixed, counts = gradient(mesh, folder, entries, objective, len(names))
    expected = {name: torch.zeros_like(value) for name, value in mixed.items()}
    for name in "abc":
        alone, own = gradient(mesh, folder, [replace(entry, data_set="") for entry in entries if entry.data_set == name], objective.of(name), len(names))
        expected = {key: expected[key] + value * own.num_tokens / counts.num_tokens for key, value in alone.items()}
    scale = max(float(value.abs().max()) for value in mixed.values())
    assert scale > 0 and all(float((mixed[key] - expected[key]).abs().max()) <= 1e-9 * scale for key in mixed)


def test_each_set_has_its_own_length_limit_mask_and_punishment() -> None:
    """DAPO eq. 13 with limit 10 and buffer 5, weight 2: 6 tokens are 1 over 5, so -0.2 * 2; a truncated one is punished whole. Set b masks instead."""
    sets = {
        "a": {"prompts": "a", "max_new_tokens": 10, "algorithm": {"overlong": {"buffer_tokens": 5, "weight": 2.0}}},
        "b": {"prompts": "b", "algorithm": {"truncated": "mask"}},
    }
    objective = objective_of_run(config(data={"sets": sets}))
    entries = [replace(entry, num_completion_tokens=length, truncated=cut) for entry, (length, cut) in zip(table(["a", "b"]), [(5, False), (6, False), (9, True), (3, False), (8, True), (8, True), (2, False), (2, False)], strict=True)]
    assert shaping_of(entries, objective) == {"overlong_punished": 2, "overlong_penalty_mean": pytest.approx((-0.4 - 2.0) / 2), "masked_truncated": 2}
    (minibatch,) = objective.minibatches(entries, num=1)
    assert ("g1", 0) not in minibatch.advantages and ("g0", 2) in minibatch.advantages
    # rewards of a: 1, 0, 0, 0 with 0, -0.4, -2, 0: 1, -0.4, -2, 0; mean -0.35, population deviation sqrt((1.35^2 + .05^2 + 1.65^2 + .35^2) / 4) = 1.0805
    assert minibatch.advantages["g0", 0] == pytest.approx(1.35 / 1.0805, abs=1e-3) and minibatch.advantages["g0", 2] == pytest.approx(-1.65 / 1.0805, abs=1e-3)


def test_a_constant_that_sums_are_divided_by_is_the_runs() -> None:
    sets = {"a": {"prompts": "a", "max_new_tokens": 4}, "b": {"prompts": "b", "algorithm": {"truncated": "mask"}}}
    objective = objective_of_run(config(data={"sets": sets}, algorithm={"name": "dr_grpo"}))
    assert [one.config.norm_tokens for one in objective.sets.values()] == [8, 8]


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"aggregation": "sequence_mean"}, {}, "data.sets.b.algorithm.aggregation=sequence_mean differs from algorithm.aggregation=token_mean: a step has one of it"),
    ({"name": "gspo"}, {}, "data.sets.b.algorithm.aggregation=sequence_mean differs from algorithm.aggregation=token_mean"),
    ({"name": "gspo", "aggregation": "token_mean"}, {}, "data.sets.b.algorithm.old_policy=recomputed differs from algorithm.old_policy=behaviour"),
    ({"kl": {"coefficient": 0.1, "reference": "frozen"}}, {}, "data.sets.b.algorithm.kl.reference=frozen differs from algorithm.kl.reference=None"),
    ({"kl": {"coefficient": 0.1, "reference": "frozen", "model": "x"}}, {"kl": {"coefficient": 0.2, "reference": "frozen"}}, "data.sets.b.algorithm.kl.model=x differs"),
    ({"name": "opd", "teacher": {"model": "t"}}, {}, "data.sets.b.algorithm.teacher='t': the run has one teacher"),
    ({"advantages": {}}, {}, "data.sets.b.algorithm: advantages: unknown key"),
    ({"advantage": {"kind": "pass_at_k", "k": 9}}, {}, "algorithm.advantage.k=9 is more than sampling.group_size=8"),
    ({"overlong": {"buffer_tokens": 9}}, {}, "algorithm.overlong.buffer_tokens=9 is more than sampling.max_new_tokens=8"),
]


@pytest.mark.parametrize(("own", "run", "words"), BAD)
def test_what_must_be_the_whole_runs_is_refused_in_one_line(own: dict[str, Any], run: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        config(data={"sets": {"a": {"prompts": "a"}, "b": {"prompts": "b", "algorithm": own}}}, algorithm=run)
    assert words in str(caught.value)


def test_a_sets_own_coefficient_of_the_runs_reference_and_a_preset_with_its_filter_are_taken() -> None:
    sets = {"a": {"prompts": "a", "algorithm": {"name": "dapo"}}, "b": {"prompts": "b", "algorithm": {"kl": {"coefficient": 0.5}}}, "c": {"prompts": "c", "zero_signal": True, "group_size": 4}}
    made = config(data={"sets": sets}, algorithm={"kl": {"coefficient": 0.1, "reference": "frozen"}})
    assert [made.zero_signal_of(name) for name in "abc"] == [True, False, True]
    kl = made.algorithm_of("b").kl
    assert kl is not None and kl.coefficient == 0.5 and kl.reference == "frozen"
    assert made.algorithm_of("a").kl is None and made.algorithm_of("c") == made.algorithm
    assert LearnerConfig.model_validate_json(made.model_dump_json()) == made
