"""Shares of mixed data sets are exact at every moment."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data_config import DataConfig
from learner.gateway.mixing import next_set, whole_weights
from tests.learner.gateway.picking_run import Run, in_pieces, prompts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 150))
def test_no_set_is_ever_as_much_as_one_group_from_its_share(weights: list[int], num_groups: int) -> None:
    """The bound of the rule's paper: 1 - 1 / (2k - 2), and 0 for a single set."""
    shares, counts, k = {str(n): w for n, w in enumerate(weights)}, Counter({str(n): 0 for n in range(len(weights))}), len(weights)
    bound = 1 - Fraction(1, 2 * k - 2) if k > 1 else Fraction(0)
    for turn in range(1, num_groups + 1):
        counts[next_set(shares, counts)] += 1
        assert all(abs(counts[name] - Fraction(turn * weight, sum(weights))) <= bound for name, weight in shares.items())


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights({"a": 0.1, "b": 0.7, "c": 2}) == {"a": 1, "b": 7, "c": 20}
    with pytest.raises(ValueError, match=r"data.sets.a.weight=0 must be above 0; leave the set out instead"):
        whole_weights({"a": 0})
    with pytest.raises(ValueError, match="greater than 0"):
        DataConfig.model_validate({"sets": {"a": {"prompts": "x", "weight": 0}}})


def test_two_to_one_is_a_pattern_of_three() -> None:
    run = Run(data={"shuffle": False, "sets": {"a": {"prompts": "x", "weight": 2}, "b": {"prompts": "y"}}}, sets={"a": prompts(4), "b": prompts(2)})
    run.fill(9)
    assert [name for name, _ in run.picks] == list("abaabaaba")
    assert run.rows("a") == [0, 1, 2, 3, 0, 1] and run.rows("b") == [4, 5, 4]  # b's rows follow a's in the catalog


def test_asking_for_the_next_prompt_changes_nothing() -> None:
    run = Run(data={"sets": {"a": {"prompts": "x"}, "b": {"prompts": "y"}}}, sets={"a": prompts(4), "b": prompts(2)})
    before = run.ledger.state()
    assert run.picker.next(run.ledger.account.history, 0) == run.picker.next(run.ledger.account.history, 0)
    assert run.ledger.state() == before
    run.open()
    run.kill(from_records=True)


def test_a_set_that_has_ended_leaves_its_share_to_the_others_and_the_run_ends_with_the_last() -> None:
    data = {"shuffle": False, "sets": {"a": {"prompts": "x", "epochs": 1}, "b": {"prompts": "y", "epochs": 2}, "c": {"prompts": "z", "epochs": 1, "weight": 2}}}
    run = Run(data=data, sets={"a": prompts(1), "b": prompts(3), "c": prompts(2)})
    run.fill(100)
    assert Counter(name for name, _ in run.picks) == {"a": 1, "b": 6, "c": 2}
    assert run.rows("b") == [1, 2, 3, 1, 2, 3]
    assert not run.open()


def test_the_end_of_a_pass_neither_loses_nor_repeats_a_prompt() -> None:
    """faults.md 95: three prompts, batches of two, four groups open: the last is trained, in a short batch where nothing follows it."""
    once = Run(data={"prompts": "x", "shuffle": False, "epochs": 1}, sets={"": prompts(3)})
    once.fill(100)
    assert once.batches == [[0, 1], [2]] and not once.open()
    twice = Run(data={"prompts": "x", "shuffle": False, "epochs": 2}, sets={"": prompts(3)})
    twice.fill(100)
    assert twice.batches == [[0, 1], [2, 0], [1, 2]] and not twice.open()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=2, max_size=4))
def test_shares_are_as_exact_from_the_moment_that_a_set_ends(sets: list[tuple[int, int]]) -> None:
    """(weight, prompts) of sets of one pass; between two ends the rest have their shares of what was given since the first of the two."""
    names = [f"s{n}" for n in range(len(sets))]
    data = {"shuffle": False, "epochs": 1, "sets": {name: {"prompts": "x", "weight": weight} for name, (weight, _) in zip(names, sets, strict=True)}}
    run = Run(data=data, sets={name: prompts(num) for name, (_, num) in zip(names, sets, strict=True)})
    run.fill(1000)
    left = {name: num for name, (_, num) in zip(names, sets, strict=True)}
    counts, ended = Counter(dict.fromkeys(names, 0)), list[str]()
    for record in run.records:
        if record["type"] != "opened":
            continue
        if found := record.get("pick", {}).get("ended"):
            assert not set(found) & set(ended)  # each ends once
            ended += found
            counts = Counter(dict.fromkeys(names, 0))
        counts[record["data_set"]] += 1
        left[record["data_set"]] -= 1
        shares = {name: weight for name, (weight, _) in zip(names, sets, strict=True) if name not in ended}
        bound = 1 - Fraction(1, 2 * len(shares) - 2) if len(shares) > 1 else Fraction(0)
        assert all(abs(counts[name] - Fraction(counts.total() * weight, sum(shares.values()))) <= bound for name, weight in shares.items())
    assert not any(left.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_killed_now_and_then_gets_the_prompts_of_an_unbroken_one(seed: int) -> None:
    data = {
        "sets": {
            "plain": {"prompts": "x", "weight": 0.7, "epochs": 2},
            "band": {"prompts": "y", "weight": 1.9, "curriculum": {"kind": "band", "min_share": 0.3, "groups": 2}, "replay": {"within_steps": 2, "solved_rate": 1.0, "solved_groups": 2}},
            "sorted": {"prompts": "z", "curriculum": {"kind": "sorted"}, "replay": {"requeue": ["unusable"], "unsolved_groups": 2, "recheck_epochs": 2}},
        }
    }
    sets = {"plain": prompts(9), "band": prompts(20), "sorted": prompts(12)}
    rates = {row: (row * 7 % 5) / 4 for row in range(41)}
    unbroken, killed = (Run(data=data, sets=sets, rates=rates, unusable=frozenset({30, 33}), seed=seed) for _ in range(2))
    in_pieces(unbroken, 150, seed=seed, kill=False)
    in_pieces(killed, 150, seed=seed, kill=True)
    assert killed.picks == unbroken.picks and killed.records == unbroken.records
    assert Counter(name for name, _ in killed.picks)["band"] > 60 and sum(killed.ledger.account.history.of("sorted").counters.values()) > 5
