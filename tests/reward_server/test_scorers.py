"""Built-in scorers against values worked by hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from reward_server.outcome import Unscored
from reward_server.scorers import exact, last_number, length, reasoning_gym, regex


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"),
        ("5.", "5"),
        ("The answer is 12.", "12"),
        ("17 - 5", "5"),
        ("17 -5", "5"),
        ("17-5", "5"),
        ("1 - 8 = -7", "-7"),
        ("1 - 8 = - 7", "-7"),
        ("1 - 8 = -7.", "-7"),
        ("1 - 8 = **-7**", "-7"),
        ("it is -7", "-7"),
        ("-7", "-7"),
        ("\N{MINUS SIGN}7", "-7"),
        ("x-3", "3"),
        ("(4)-3", "3"),
        ("2 items:\n- 7", "7"),
        ("5\n-3", "-3"),
        ("3.25", "3.25"),
        ("-0.50", "-0.5"),
        (".5", "0.5"),
        ("1,234", "1234"),
        ("1,234,567.5 in all", "1234567.5"),
        ("1, 2, 3", "3"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("-$4.20", "-4.2"),
        ("about 1e3", "1000"),
        ("1e5000", "5000"),
        ("1/3", "3"),
        ("5\N{EN DASH}7", "7"),
        ("007", "7"),
    ],
)
def test_the_last_number_of_a_text_has_the_sign_a_reader_gives_it(text: str, number: str) -> None:
    assert last_number.last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "\N{ARABIC-INDIC DIGIT FIVE}", "-", "1" * 0])
def test_a_text_without_a_number_has_none(text: str) -> None:
    assert last_number.last_number(text) is None


def test_ten_million_characters_are_read_in_a_second_or_two() -> None:
    assert last_number.last_number("1,234," * 1_600_000 + " = 5") == 5
    assert last_number.last_number("9" * 10_000_000 + " = 5") == 5


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("6 + 5 = 11.", "11", 1.0),
        ("6 + 5 = 11.", 11, 1.0),
        ("11.0", 11, 1.0),
        ("6 + 5 = 11.", "12", 0.0),
        ("1 - 8 = -7", "-7", 1.0),
        ("1 - 8 = 7", "-7", 0.0),
        ("no idea", "3", 0.0),
        ("0.1 + 0.2 = 0.3", 0.3, 1.0),
        ("1,000", "1000", 1.0),
        ("4 or 5", ["5", "6"], 1.0),
        ("7", "7.", 1.0),
    ],
)
def test_last_number_compares_with_the_gold_answer(completion: str, gold: Any, value: float) -> None:
    assert last_number.score("", completion, {"answer": gold}) == value


def test_last_number_accepts_what_lies_within_the_tolerance() -> None:
    assert last_number.score("", "3.14", {"pi": 3.14159}, field="pi", tolerance=0.01) == 1.0  # |3.14 - 3.14159| = 0.00159
    assert last_number.score("", "3.1", {"pi": 3.14159}, field="pi", tolerance=0.01) == 0.0  # 0.04159


@pytest.mark.parametrize("fields", [{}, {"answer": "Paris"}, {"answer": None}, {"answer": []}, {"answer": {"x": 1}}, {"answer": "1/3"}])
def test_a_record_whose_gold_is_no_number_is_refused_and_not_scored_zero_for_ever(fields: dict[str, Any]) -> None:
    outcome = last_number.score("", "3", fields)
    assert isinstance(outcome, Unscored) and outcome.reason == ("bad_reference" if fields else "refused") and "answer" in outcome.detail


def test_exact_ignores_space_by_default_and_case_on_request() -> None:
    assert exact.score("", "  New\n York ", {"answer": "New York"}) == 1.0
    assert exact.score("", "new york", {"answer": "New York"}) == 0.0
    assert exact.score("", "new york", {"answer": "New York"}, ignore_case=True) == 1.0
    assert exact.score("", "New  York", {"answer": "New York"}, ignore_space=False) == 0.0
    assert exact.score("", "b", {"options": ["a", "b"]}, field="options") == 1.0
    assert isinstance(exact.score("", "b", {}), Unscored)


def test_regex_finds_a_pattern_or_compares_what_the_last_match_captured() -> None:
    assert regex.score("", "<answer>5</answer>", {}, pattern="<answer>.*</answer>") == 1.0
    assert regex.score("", "so <answer>5</answer>", {}, pattern="<answer>.*</answer>", whole=True) == 0.0
    both = "<answer>4</answer> no, <answer> 5 </answer>"
    assert regex.score("", both, {"answer": 5}, pattern="<answer>(.*?)</answer>", field="answer") == 1.0
    assert regex.score("", both, {"answer": 4}, pattern="<answer>(.*?)</answer>", field="answer") == 0.0
    assert regex.score("", "none", {"answer": 4}, pattern="<answer>(.*?)</answer>", field="answer") == 0.0


def test_regex_refuses_a_pattern_that_does_not_compile_or_captures_nothing() -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        regex.check(pattern="(")
    with pytest.raises(ValueError, match="no group"):
        regex.check(pattern="a+", field="answer")


@pytest.mark.parametrize(
    ("completion", "value"),
    [("abcd", 1.0), ("ab", 1.0), ("a", 0.5), ("", 0.0), ("abcde", 0.5), ("abcdef", 0.0), ("abcdefghij", 0.0)],
)
def test_length_falls_in_a_straight_line_outside_its_bounds(completion: str, value: float) -> None:
    # bounds [2, 4], slack 2: one character outside costs 1/2
    assert length.score("", completion, {}, least=2, most=4, slack=2) == (value, {"length": float(len(completion))})


def test_length_counts_words_and_lines() -> None:
    assert length.score("", "a b  c", {}, most=3, unit="words") == (1.0, {"length": 3.0})
    assert length.score("", "a\nb\nc", {}, most=2, unit="lines") == (0.0, {"length": 3.0})
    with pytest.raises(ValueError, match="least=5, most=4"):
        length.check(least=5, most=4)


def test_reasoning_gym_judges_the_extracted_answer_by_the_data_sets_own_rule() -> None:
    entry = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {"source_dataset": "chain_sum"}}
    args: dict[str, Any] = {"dataset": "chain_sum", "extract": "last_number"}
    assert reasoning_gym.score("", "4 - 1 - 7 = -4.", {"entry": entry}, **args) == 1.0
    assert reasoning_gym.score("", "4 - 1 - 7 = 4", {"entry": entry}, **args) == 0.0
    assert reasoning_gym.score("", "none", {"entry": entry}, **args) == 0.0
    assert reasoning_gym.score("", "-4", entry, dataset="chain_sum") == 1.0  # the record is the entry
    assert reasoning_gym.score("", "-4\nbecause", entry, dataset="chain_sum", extract="first_line") == 1.0
    assert isinstance(reasoning_gym.score("", "4", {}, **args), Unscored)
    as_number = {"answer": -4, "metadata": entry["metadata"]}  # a record that writes the answer as a number
    assert reasoning_gym.score("", "= -4", as_number, **args) == 1.0 and reasoning_gym.score("", "= 4", as_number, **args) == 0.0


def test_reasoning_gym_with_a_threshold_is_one_or_zero_and_keeps_the_judgement_as_a_part() -> None:
    # spell_backward falls back to a share: whatever score_answer gives below 0.999 becomes 0
    entry = {"question": "Spell this word backward: abc", "answer": "cba", "metadata": {"word": "abc"}}
    assert reasoning_gym.score("", "cba", entry, dataset="spell_backward", threshold=0.999) == (1.0, {"score_answer": 1.0})
    value, parts = reasoning_gym.score("", "cbx", entry, dataset="spell_backward", threshold=0.999)  # type: ignore[misc]
    assert value == 0.0 and parts["score_answer"] < 0.999


def test_reasoning_gym_names_the_nearest_data_sets_of_an_unknown_one() -> None:
    with pytest.raises(ValueError, match="chain_sum"):
        reasoning_gym.check(dataset="chain_sums")
    with pytest.raises(ValueError, match="first_line"):
        reasoning_gym.check(dataset="chain_sum", extract="middle")  # type: ignore[arg-type]
