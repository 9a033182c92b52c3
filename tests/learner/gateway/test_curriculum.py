"""Prompts by what is known of them: bands, sorted passes, rests, solved and hopeless ones, and dropped groups that come again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from learner.data_config import DataConfig
from learner.gateway.choosers import picker_of
from learner.gateway.curriculum import MeasuredPasses
from tests.learner.gateway.picking_run import Run, prompts

BAND = {"kind": "band", "low": 0.2, "high": 0.8, "min_share": 0.25, "groups": 1}


def run_of(num: int, *, rates: dict[int, float] | None = None, unusable: frozenset[int] = frozenset(), fields: dict[str, list[Any]] | None = None, **data: Any) -> Run:
    return Run(data={"prompts": "x", "shuffle": False, **data}, sets={"": prompts(num, **(fields or {}))}, rates=rates or {}, unusable=unusable)


def counters(run: Run, name: str = "") -> dict[str, int]:
    return {key: value for key, value in run.ledger.account.history.of(name).counters.items() if value}


def test_the_band_is_trained_and_the_rest_has_its_share_the_longest_not_given_first() -> None:
    """Rows 0 to 7; 0, 2, 4, 6 are always passed and so outside once measured. Of n groups floor(n / 4) are turns outside."""
    run = run_of(8, rates=dict.fromkeys((0, 2, 4, 6), 1.0), curriculum=BAND)
    run.fill(4)
    assert run.rows() == [0, 1, 2, 3]  # turn 4 was outside, but nothing was measured yet
    run.fill(48)
    late = Counter(run.rows()[16:])  # 32 groups, 8 of them outside
    assert all(late[row] == 2 for row in (0, 2, 4, 6)) and all(late[row] == 6 for row in (1, 3, 5, 7))
    assert counters(run)["outside"] == 11  # turns 8, 12, ... 48


def test_a_difficulty_stands_in_for_what_nobody_has_measured() -> None:
    run = run_of(4, fields={"hard": [0.0, 0.5, 0.5, 1.0]}, curriculum={**BAND, "difficulty_field": "hard"}, rates={0: 1.0, 3: 0.0})
    run.fill(8)
    # turns outside are the 4th and the 8th: 0 then 3, neither given before; ties go to the lower row
    assert run.rows() == [1, 2, 1, 0, 2, 1, 2, 3]


def test_with_nothing_in_the_band_the_rest_is_given_and_counted() -> None:
    run = run_of(2, rates={0: 1.0, 1: 1.0}, curriculum=BAND)
    run.fill(20)
    assert Counter(run.rows()[4:]) == {0: 8, 1: 8} and counters(run)["band_empty"] >= 8


@pytest.mark.parametrize(("first", "order"), [("easy", [2, 1, 0]), ("hard", [0, 1, 2])])
def test_a_sorted_pass_follows_the_rates_known_when_it_begins(first: str, order: list[int]) -> None:
    run = run_of(3, rates={0: 0.0, 1: 0.5, 2: 1.0}, curriculum={"kind": "sorted", "first": first, "groups": 1})
    run.fill(3)
    run.fill(9)
    assert run.rows()[:3] == [0, 1, 2]  # unknown: in order
    assert run.rows()[6:9] == order


def test_every_sorted_pass_has_every_prompt_once_though_rates_change_on_the_way() -> None:
    run = run_of(7, rates={row: (row * 3 % 5) / 4 for row in range(7)}, curriculum={"kind": "sorted", "groups": 1})
    run.fill(28)
    assert [sorted(run.rows()[start : start + 7]) for start in range(0, 28, 7)] == [list(range(7))] * 4


def test_a_difficulty_sorts_the_first_pass() -> None:
    run = run_of(3, fields={"d": [0.9, 0.1, 0.4]}, curriculum={"kind": "sorted", "difficulty_field": "d"}, epochs=1)
    run.fill(10)
    assert run.rows() == [1, 2, 0] and not run.open()


def test_solved_prompts_are_not_given_any_more_and_a_set_of_solved_ones_has_ended() -> None:
    run = run_of(3, rates={0: 1.0, 1: 1.0, 2: 0.5}, replay={"solved_rate": 1.0, "solved_groups": 2})
    run.fill(30)
    assert Counter(run.rows())[0] <= 4 and Counter(run.rows())[2] > 20  # two to be measured, and those that were open meanwhile
    done = run_of(2, rates={0: 1.0, 1: 1.0}, replay={"solved_rate": 1.0, "solved_groups": 2})
    done.fill(100)
    assert len(done.picks) < 10 and not done.open()


def test_hopeless_prompts_are_parked_and_looked_at_again() -> None:
    run = run_of(2, rates={0: 0.0}, replay={"unsolved_groups": 2, "recheck_epochs": 3})
    run.fill(60)
    rows = run.rows()[10:]
    gaps = [b - a for a, b in zip([n for n, row in enumerate(rows) if row == 0], [n for n, row in enumerate(rows) if row == 0][1:], strict=False)]
    assert gaps and set(gaps) <= {4, 5, 6}  # one turn, then three passes of row 1 alone (a pass or two are under way when it is measured)


def test_a_prompt_rests_between_two_of_its_turns() -> None:
    """P = 2 and S = 1, so about two groups a step: 12 prompts last 6 steps, 5 of rest never matter; 4 prompts cannot rest so long."""
    enough = run_of(12, replay={"within_steps": 4})
    enough.fill(40)
    assert counters(enough) == {"measured": counters(enough)["measured"]}
    short = run_of(4, replay={"within_steps": 8})
    short.fill(40)
    assert counters(short)["rest_short"] > 20
    assert all(count == 10 for count in Counter(short.rows()).values())  # the longest rested goes first


def test_two_turns_within_so_many_steps_are_allowed_where_they_are_asked_for() -> None:
    """Passes of three prompts, two groups a step: with most 2 a prompt of turns 0 and 3 (steps 0 and 1) rests, with most 3 it does not."""
    strict, loose = run_of(3, replay={"within_steps": 3, "most": 2}), run_of(3, replay={"within_steps": 3, "most": 3})
    for run in (strict, loose):
        run.fill(24)
    assert counters(strict).get("rest_short", 0) > counters(loose).get("rest_short", 0) == 0


def test_all_prompts_of_dropped_groups_come_again() -> None:
    run = run_of(6, unusable=frozenset({0, 1, 2}), replay={"requeue": ["unusable"]}, epochs=1)
    run.fill(50)
    assert Counter(run.rows()) == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}


def test_the_prompt_of_a_dropped_group_comes_again_so_often_and_no_more() -> None:
    run = run_of(4, unusable=frozenset({1}), replay={"requeue": ["unusable"], "requeue_most": 2}, epochs=1)
    run.fill(50)
    assert Counter(run.rows()) == {0: 1, 1: 3, 2: 1, 3: 1}
    assert counters(run) == {"again": 2, "given_up": 1, "measured": 3}
    assert run.ledger.counts().dropped == {"unusable": 3}


def test_a_set_that_had_ended_comes_back_for_a_dropped_group() -> None:
    data = {"sets": {"a": {"prompts": "x", "epochs": 1, "replay": {"requeue": ["unusable"]}}, "b": {"prompts": "y", "epochs": 3}}, "shuffle": False}
    run = Run(data=data, sets={"a": prompts(1), "b": prompts(4)}, unusable=frozenset({0}))
    run.fill(50)
    assert Counter(run.picks)[("a", 0)] == 2 and len(run.rows("b")) == 12


def test_no_prompt_starves() -> None:
    """Of 30 prompts 20 are outside; with a share of a tenth each has a turn within 20 / 0.1 groups and what the passes take."""
    run = run_of(30, rates=dict.fromkeys(range(20), 1.0), curriculum={**BAND, "min_share": 0.1})
    run.fill(60)
    seen = Counter(run.rows())
    assert min(seen[row] for row in range(30)) >= 1
    run.fill(280)
    assert all(Counter(run.rows()[60:])[row] >= 1 for row in range(30))


def test_a_difficulty_that_is_none_is_refused() -> None:
    config = DataConfig.model_validate({"prompts": "x", "curriculum": {"kind": "sorted", "difficulty_field": "d"}})
    for value in (None, True, 1.5, "hard"):
        with pytest.raises(ValueError, match=r"data.curriculum.difficulty_field='d': prompt '0' has .* there; give every prompt a number from 0 \(easy\) to 1 \(hard\)"):
            picker_of(config.sources, {"": prompts(1, d=[value])}, seed=0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"curriculum": {"kind": "band", "low": 0.9, "high": 0.1}}, "curriculum.low=0.9 is over high=0.1"),
        ({"replay": {"most": 2}}, "replay.most=2 without within_steps"),
        ({"replay": {"recheck_epochs": 2}}, "with neither solved_rate nor unsolved_groups"),
        ({"sets": {"a": {"prompts": "y"}}}, "a run has one data set (prompts) or several (sets); give exactly one of the two"),
    ],
)
def test_settings_without_effect_or_sense_fail_at_load(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        DataConfig.model_validate({"prompts": "x", **data})
    assert words in str(caught.value)


def test_what_stands_beside_the_sets_holds_for_each_and_resolving_twice_changes_nothing() -> None:
    data = DataConfig.model_validate({"template": "raw", "shuffle": False, "sets": {"a": {"prompts": "x"}, "b": {"prompts": "y", "template": "chat"}}})
    assert [one.template for one in data.sources.values()] == ["raw", "chat"]
    assert DataConfig.model_validate(data.model_dump()) == data == DataConfig.model_validate_json(data.model_dump_json())


def test_nothing_is_kept_of_each_prompt_where_nobody_asks() -> None:
    run = run_of(4)
    run.fill(10)
    assert not run.ledger.account.history.of("").tracks and not isinstance(run.picker.choosers[""], MeasuredPasses)
    assert "pick" not in run.records[1] and run.rows() == [0, 1, 2, 3] * 2 + [0, 1]
