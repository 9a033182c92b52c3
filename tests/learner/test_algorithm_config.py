"""Presets and composition: what trains, what is refused by name, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from learner.algorithm_config import ClipLoss, GroupAdvantage
from learner.config import LearnerConfig
from learner.gateway.gateway import limits_of
from learner.presets import PRESETS, merged

TEACHER = {"teacher": {"model": "t"}}
TRAINS = sorted(PRESETS)


def learner(algorithm: dict[str, Any], **more: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"run_dir": "r", "model": "m", "data": {"prompts": "p"}, "algorithm": algorithm, **more})


def test_the_default_is_grpo() -> None:
    made = LearnerConfig.model_validate({"run_dir": "r", "model": "m", "data": {"prompts": "p"}})
    assert made == learner({"name": "grpo"})
    assert (made.algorithm.advantage, made.algorithm.loss) == (GroupAdvantage(), ClipLoss()) and made.algorithm.aggregation == "token_mean"


@pytest.mark.parametrize("name", TRAINS)
def test_a_resolved_preset_reads_back_as_itself(name: str) -> None:
    made = learner({"name": name, **(TEACHER if name == "opd" else {})})
    assert LearnerConfig.model_validate_json(made.model_dump_json()) == made


def test_a_preset_without_its_role_is_refused_by_name_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"algorithm.name=opd: .*needed there"):
        learner({"name": "opd"})


def test_remax_needs_one_sample_beside_the_greedy_one() -> None:
    made = learner({"name": "remax"}, sampling={"group_size": 1})
    assert made.has_baseline("") and made.filter.min_usable == 1 and not learner({}).has_baseline("")


def test_a_data_set_may_have_a_baseline_where_the_run_has_none() -> None:
    sets = {"a": {"prompts": "a", "algorithm": {"name": "remax"}}, "b": {"prompts": "b"}}
    made = LearnerConfig.model_validate({"run_dir": "r", "model": "m", "data": {"sets": sets}})
    assert limits_of(made).baselines == {"a"} and (limits_of(made).size_of("a"), limits_of(made).size_of("b"), limits_of(made).largest_group) == (9, 8, 9)


def test_own_keys_go_on_top_of_the_preset() -> None:
    made = learner({"name": "gspo", "loss": {"clip_high": 1e-3}, "aggregation": "token_mean"}).algorithm
    assert made.loss.model_dump() == {"kind": "gspo", "clip_low": 3e-4, "clip_high": 1e-3} and made.aggregation == "token_mean"


def test_another_kind_replaces_the_presets_section() -> None:
    made = learner({"name": "dr_grpo", "loss": {"kind": "cispo"}, "advantage": {"kind": "leave_one_out"}}).algorithm
    assert made.loss.kind == "cispo" and made.advantage.model_dump() == {"kind": "leave_one_out"} and made.aggregation == "sequence_sum"
    assert merged({"a": {"kind": "x", "n": 1}}, {"a": {"n": 2}}) == {"a": {"kind": "x", "n": 2}}


def test_dapo_resamples_groups_without_signal_unless_told_otherwise() -> None:
    assert learner({"name": "dapo"}).filter.zero_signal and not learner({"name": "grpo"}).filter.zero_signal
    assert not learner({"name": "dapo"}, filter={"zero_signal": False}).filter.zero_signal
    assert learner({"name": "dapo"}, filter={"min_usable": 3}).filter.model_dump()["zero_signal"]


def test_a_correction_can_be_switched_off() -> None:
    assert learner({"name": "rloo", "correction": None}).algorithm.correction is None


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an option that the kind does not read": ({"loss": {"kind": "sapo", "clip_low": 0.2}}, {}, "clip_low"),
    "an unknown kind": ({"loss": {"kind": "magic"}}, {}, "magic"),
    "a dual clip that would clip everything": ({"loss": {"dual_clip": 1.0}}, {}, "greater than 1"),
    "a constant that nothing divides by": ({"norm_tokens": 8}, {}, "only sequence_sum divides by a constant"),
    "the mismatch counted twice": ({"correction": {}}, {}, "would count twice"),
    "a start for a ratio that is not there": ({"name": "rloo", "old_policy": "recomputed"}, {}, "has no ratio"),
    "a lower bound that is not read": ({"old_policy": "recomputed", "correction": {"low": 0.5}}, {}, "truncate has no lower bound"),
    "a missing lower bound": ({"old_policy": "recomputed", "correction": {"mode": "mask"}}, {}, "set low"),
    "bounds the wrong way round": ({"old_policy": "recomputed", "correction": {"mode": "mask", "low": 3, "high": 2}}, {}, "no ratio would be inside"),
    "a pull to nowhere": ({"kl": {"coefficient": 0.1, "estimator": "k1", "gradient": "plain"}}, {}, "pulls nowhere"),
    "a reward that is 0": ({"kl": {"coefficient": 0.1, "where": "reward"}}, {}, "use where=loss"),
    "a teacher that nobody hears": (TEACHER, {}, "goes with advantage.kind=teacher"),
    "a teacher beside a filter by reward": ({"name": "opd", **TEACHER}, {"filter": {"zero_signal": True}}, "judges groups of equal rewards"),
    "a decay of a copy": ({"kl": {"coefficient": 0.1, "reference": "periodic", "every_steps": 5, "decay": 0.9}}, {}, "only reference=ema reads it"),
    "an average without a decay": ({"kl": {"coefficient": 0.1, "reference": "ema"}}, {}, "needs decay"),
    "a gradient of a reward": ({"kl": {"coefficient": 0.1, "reference": "frozen", "where": "reward", "gradient": "plain"}}, {}, "a reward has no gradient"),
    "a group of one": ({}, {"sampling": {"group_size": 1}, "filter": {"min_usable": 1}}, "a group of one has no spread"),
    "a filter that drops every group": ({"name": "reinforce_pp"}, {"sampling": {"group_size": 1}, "filter": {"min_usable": 1, "zero_signal": True}}, "every group would be dropped"),
    "a subset larger than the group": ({"advantage": {"kind": "pass_at_k", "k": 9}}, {}, "k=9 is more than"),
    "a filter of totals beside parts": ({"name": "dapo", "advantage": {"kind": "several_rewards", "weights": {"a": 1}}}, {}, "looks at the total"),
    "a filter by spread beside a baseline": ({"name": "remax"}, {"filter": {"zero_signal": True}}, "still differ from the greedy"),
    "a control that teaches by its mean": ({"name": "remax"}, {"control": "shuffled_rewards"}, "against the greedy answer would still teach"),
    "a control that teaches": ({"advantage": {"kind": "several_rewards", "weights": {"a": 1}}}, {"control": "shuffled_rewards"}, "would still teach"),
    "a buffer longer than an answer": ({"overlong": {"buffer_tokens": 300}}, {}, "use a smaller buffer"),
    "a function without a module": ({"loss": {"kind": "custom", "function": "mine"}}, {}, "function"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_fails_at_load(case: str) -> None:
    algorithm, more, message = CONTRADICTIONS[case]
    with pytest.raises(ValidationError, match=message):
        learner(algorithm, **more)


def test_reinforce_pp_trains_on_one_sample_a_prompt() -> None:
    assert learner({"name": "reinforce_pp"}, sampling={"group_size": 1}, filter={"min_usable": 1}).sampling.group_size == 1


def test_a_mask_may_go_with_the_ratio_to_the_sampler() -> None:
    # It removes tokens and weighs none, so nothing counts twice.
    assert learner({"correction": {"mode": "reject", "low": 0.5, "high": 2.0, "veto": 1e-4}}).algorithm.correction is not None
