"""Scores made of scores: the arithmetic by hand, and the whole way through a served plane."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_server.combine_config import check_names
from reward_server.combining import Clip, Gate, Normalise, Product, Route, Rule, Sum, outcome_of
from reward_server.config import RewardConfig
from reward_server.outcome import Scored, Unscored
from tests.reward_server.endpoints.conftest import plane_of, score


def known(**values: float) -> dict[str, Scored]:
    return {name: Scored(value=value) for name, value in values.items()}


RIGHT, SHORT = 1.0, 0.0


@pytest.mark.parametrize(
    ("rule", "scores", "expected"),
    [
        (Sum(weights={"right": 0.7, "short": 0.3}), {}, ("right", "short")),
        (Sum(weights={"right": 0.7, "short": 0.3}), {"right": 1.0}, ("short",)),
        (Sum(weights={"right": 0.7, "short": 0.3}), {"right": 1.0, "short": 0.0}, 0.7),  # faults.md 132
        (Sum(weights={"right": 2.0, "long": -0.5}), {"right": 1.0, "long": 3.0}, 0.5),  # 2 − 1.5
        (Product(of=("a", "b")), {"a": 0.5, "b": -4.0}, -2.0),
        (Gate(of="judge", by="format", at_least=1.0, otherwise=-1.0), {}, ("format",)),
        (Gate(of="judge", by="format", at_least=1.0, otherwise=-1.0), {"format": 0.99}, -1.0),  # the judge is not asked
        (Gate(of="judge", by="format", at_least=1.0, otherwise=-1.0), {"format": 1.0}, ("judge",)),
        (Gate(of="judge", by="format", at_least=1.0, otherwise=-1.0), {"format": 1.0, "judge": 0.3}, 0.3),
        (Clip(of="a", low=-1.0, high=1.0), {"a": 7.0}, 1.0),
        (Clip(of="a", low=-1.0, high=1.0), {"a": -7.0}, -1.0),
        (Clip(of="a", low=-1.0, high=1.0), {"a": 0.5}, 0.5),
    ],
)
def test_a_rule_says_what_it_needs_and_then_the_number(rule: Rule, scores: dict[str, float], expected: Any) -> None:
    assert rule.decide(known(**scores), {}) == pytest.approx(expected)


BIG = 1e308


@pytest.mark.parametrize(
    ("rule", "scores"),
    [
        (Sum(weights={"a": 1.0, "b": 1.0}), {"a": BIG, "b": BIG}),  # 2e308 is above the largest float
        (Sum(weights={"a": 10.0, "b": -10.0}), {"a": BIG, "b": BIG}),  # infinity less infinity
        (Product(of=("a", "b")), {"a": BIG, "b": 10.0}),
    ],
)
def test_scores_too_large_for_a_float_are_unscored_and_never_nan(rule: Rule, scores: dict[str, float]) -> None:
    outcomes = [outcome_of(value, known(**scores)) for _ in range(2) if isinstance(value := rule.decide(known(**scores), {}), float)]
    assert [each.reason for each in outcomes if isinstance(each, Unscored)] == ["non_finite"] * 2


def test_one_score_beyond_all_bounds_does_not_spoil_the_running_statistics() -> None:
    rule = Normalise(of="a", halflife=1e9, warm_up=0)
    assert rule.decide(known(a=1.0), {}) == 0.0
    assert rule.decide(known(a=BIG), {}) != rule.decide(known(a=BIG), {})  # NaN
    assert rule.decide(known(a=3.0), {}) == pytest.approx(1.0)  # of 1 and 3: mean 2, deviation 1


@pytest.mark.parametrize(
    ("record", "expected"),
    [({"set": "gsm8k"}, ("math",)), ({"set": 7}, ("seven",)), ({"set": True}, ("true",)), ({"set": "poems"}, ("judge",)), ({}, ("judge",))],
)
def test_a_field_of_the_record_chooses_the_scorer(record: dict[str, Any], expected: tuple[str, ...]) -> None:
    rule = Route(by="set", to={"gsm8k": "math", "7": "seven", "True": "true"}, otherwise="judge")
    assert rule.decide({}, record) == expected


def test_a_record_without_a_way_is_refused_with_the_ways_there_are() -> None:
    rule = Route(by="set", to={"gsm8k": "math"}, otherwise="")
    without, unknown = rule.decide({}, {}), rule.decide({}, {"set": "poems"})
    assert isinstance(without, Unscored) and "no field 'set'" in without.detail
    assert isinstance(unknown, Unscored) and "set='poems'" in unknown.detail and "gsm8k" in unknown.detail


def test_running_statistics_are_those_of_the_scores_so_far() -> None:
    rule = Normalise(of="a", halflife=1e12, warm_up=2)
    # warm-up, deviation 1: 1 − 1 = 0; mean 2, 3 − 2 = 1. Then 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3; (8 − 4) / √(26/3) = 1.358732
    assert [rule.decide(known(a=value), {}) for value in (1.0, 3.0, 8.0)] == pytest.approx([0.0, 1.0, 1.358732], abs=1e-6)


def test_older_scores_count_half_after_their_halflife() -> None:
    rule = Normalise(of="a", halflife=1.0, warm_up=2)
    for value in (0.0, 3.0):
        rule.decide(known(a=value), {})
    # weights 1/2, 1: mean 2, variance (0.5 · 4 + 1 · 1) / 1.5 = 2
    assert rule.mean == pytest.approx(2.0) and rule.deviation == pytest.approx(2.0**0.5)


def test_equal_scores_normalise_to_nothing_and_never_to_infinity() -> None:
    rule = Normalise(of="a", halflife=1000.0, warm_up=2)
    assert [rule.decide(known(a=0.3), {}) for _ in range(5)] == pytest.approx([0.0] * 5, abs=1e-12)


def test_parts_keep_the_scores_before_weights_with_parts_of_parts() -> None:
    scores = {"right": Scored(value=1.0, parts={"tests": 3.0}), "short": Scored(value=0.0)}
    assert outcome_of(0.7, scores) == Scored(value=0.7, parts={"right": 1.0, "right.tests": 3.0, "short": 0.0})
    overflow = outcome_of(float("inf"), scores)
    assert isinstance(overflow, Unscored) and overflow.reason == "non_finite"
    crowd = outcome_of(1.0, {str(number): Scored(value=1.0) for number in range(65)})
    assert isinstance(crowd, Unscored) and "65 parts" in crowd.detail


LENGTH = {"name": "short", "use": "length", "args": {"most": 3, "slack": 1}}
RIGHT_ONE = {"name": "right", "use": "exact"}


async def test_a_weighted_sum_of_one_and_nothing_is_seven_tenths_and_counted_with_its_parts() -> None:
    # faults.md 132: rewards (1, 0), weights (.7, .3)
    total = {"name": "total", "combine": {"op": "sum", "of": {"right": 0.7, "short": 0.3}}}
    async with plane_of(total, RIGHT_ONE, LENGTH) as plane:
        assert await score(plane, "eleven", answer="eleven") == Scored(value=0.7, parts={"right": 1.0, "short": 0.0, "short.length": 6.0})
        refused = await score(plane, "eleven")
        assert isinstance(refused, Unscored) and refused.reason == "refused" and refused.detail.startswith("part 'right': ")
        assert [(plane.tallies[name].num_answered, plane.tallies[name].unscored) for name in ("total", "right")] == [(2, {"refused": 1})] * 2


async def test_combinations_may_be_nested_and_routed_by_data_set() -> None:
    route = {"name": "any", "combine": {"op": "route", "field": "set", "to": {"a": "clipped", "b": "right"}}}
    clipped = {"name": "clipped", "combine": {"op": "clip", "of": "doubled", "high": 1.5}}
    doubled = {"name": "doubled", "combine": {"op": "sum", "of": {"right": 2.0}}}
    async with plane_of(route, clipped, doubled, RIGHT_ONE) as plane:
        assert await score(plane, "x", set="a", answer="x") == Scored(value=1.5, parts={"clipped": 1.5, "clipped.doubled": 2.0, "clipped.doubled.right": 1.0})
        assert await score(plane, "x", set="b", answer="x") == Scored(value=1.0, parts={"right": 1.0})


@pytest.mark.parametrize(
    ("combine", "words"),
    [
        ({"op": "sum", "of": {"rihgt": 1.0}}, "combines ['rihgt'], none of the scorers"),
        ({"op": "clip", "of": "right"}, "neither low nor high"),
        ({"op": "clip", "of": "right", "low": 2, "high": 1}, "low=2 above high=1"),
        ({"op": "product", "of": ["total"]}, "in a circle"),
        ({"op": "mean", "of": ["right"]}, "'sum', 'product', 'gate', 'clip', 'normalise', 'route'"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_at_load(combine: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        RewardConfig.model_validate({"scorers": [RIGHT_ONE, {"name": "total", "combine": combine}]})
    assert words in str(caught.value)


def test_names_may_be_used_before_they_are_defined() -> None:
    config = RewardConfig.model_validate({"scorers": [{"name": "a", "combine": {"op": "clip", "of": "b", "low": 0}}, {"name": "b", "combine": {"op": "clip", "of": "right", "low": 0}}, RIGHT_ONE]})
    check_names({each.name: each.combine for each in config.scorers if each.combine}, [each.name for each in config.scorers])


def test_every_list_of_scorers_in_the_documentation_is_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith("scorers:")]
    assert len(blocks) >= 3
    for block in blocks:
        RewardConfig.model_validate(yaml.safe_load(block))
