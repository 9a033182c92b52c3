"""Rule scorers against values worked by hand, and what their configurations may not be."""

from __future__ import annotations

from typing import Any

import pytest

from reward_server import registry, scorers
from reward_server.outcome import Unscored
from reward_server.scorers import format, json_schema, overlong, repetition

CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}, "size": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"city": "Rome"}', 1.0),
        (' {"city": "Rome", "size": 3} ', 1.0),
        ('{"city": 5}', 0.0),
        ('{"city": "Rome", "size": NaN}', 0.0),
        ('{"city": "Rome", "more": 1}', 0.0),
        ("Rome", 0.0),
        ("", 0.0),
        ('{"city": "Rome"', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 5000, 0.0),  # more digits than Python reads
        ('{"city": "\ud800"}', 1.0),
    ],
)
def test_json_is_worth_one_when_the_schema_accepts_it(completion: str, value: float) -> None:
    outcome = json_schema.score("", completion, {}, schema=CITY)
    assert isinstance(outcome, tuple) and outcome[0] == value
    for word in ("NaN", "Infinity", "[-Infinity]"):  # no JSON, whatever a schema would accept
        assert json_schema.score("", word, {}, schema=True) == (0.0, {"valid_json": 0.0})


def test_json_counts_errors_takes_blocks_and_schemas_of_the_record() -> None:
    # city has the wrong type, size too: 2
    assert json_schema.score("", '{"city": 1, "size": "x"}', {}, schema=CITY) == (0.0, {"valid_json": 1.0, "num_errors": 2.0})
    block = 'so:\n```json\n{"city": "Rome"}\n```\nend'
    assert json_schema.score("", block, {}, schema=CITY, extract="last_block")[0] == 1.0  # type: ignore[index]
    assert json_schema.score("", block, {}, schema=CITY)[0] == 0.0  # type: ignore[index]
    assert json_schema.score("", "5", {"s": {"type": "integer"}}, field="s")[0] == 1.0  # type: ignore[index]
    assert json_schema.score("", "5", {"s": '{"type": "string"}'}, field="s")[0] == 0.0  # type: ignore[index]
    recursive = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    assert json_schema.score("", "[[[]]]", {}, schema=recursive)[0] == 1.0  # type: ignore[index]


@pytest.mark.parametrize("schema", [{"type": "what"}, 5, "{", {"$ref": "http://elsewhere/schema"}, None, {"pattern": "("}])
def test_a_schema_of_the_record_that_is_none_is_a_bad_reference(schema: Any) -> None:
    outcome = json_schema.score("", "5", {"s": schema}, field="s")
    assert isinstance(outcome, Unscored) and outcome.reason == "bad_reference"
    assert json_schema.score("", "5", {}, field="s").reason == "refused"  # type: ignore[union-attr]


GOOD = "<think>2 + 2</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("completion", "args", "value"),
    [
        (GOOD, {}, 1.0),
        ("so " + GOOD, {}, 0.0),
        ("so " + GOOD, {"outside": True}, 1.0),
        (GOOD + "<answer>5</answer>", {}, 0.0),
        ("<answer>4</answer><think>2</think>", {}, 0.0),
        ("<think><answer>4</answer></think>", {}, 0.0),
        ("<answer>4</answer><think>2</think>", {"outside": True}, 0.0),
        ("<think><answer>4</answer></think>", {"outside": True}, 0.0),
        ("<think>2</think><answer> </answer>", {}, 0.0),
        ("<think>2</think><answer> </answer>", {"may_be_empty": True}, 1.0),
        ("2 + 2</think><answer>4</answer>", {"opened": True}, 1.0),
        ("2 + 2</think><answer>4</answer>", {}, 0.0),
        ("<Think>2</Think><answer>4</answer>", {}, 0.0),
        ("<plan>p</plan><do>d</do><say>s</say>", {"sections": ["plan", "do", "say"]}, 1.0),
        ("", {}, 0.0),
        ("", {"partial": True}, 0.0),
        ("so " + GOOD, {"partial": True}, 6 / 7),  # 4 tags once, order, nothing empty; not: nothing outside
        ("<think>2</think>4", {"partial": True}, 2 / 7),  # 2 tags of 4; without all of them nothing else counts
    ],
)
def test_format_wants_each_section_once_in_order_and_nothing_else(completion: str, args: dict[str, Any], value: float) -> None:
    assert format.score("", completion, {}, **args)[0] == pytest.approx(value)


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (1000, -1.0)])
def test_overlong_costs_nothing_then_falls_in_a_straight_line(length: int, value: float) -> None:
    # DAPO equation 13 with L_max 100, L_cache 20: ((100 - 20) - length) / 20
    assert overlong.score("", "x" * length, {}, most=100, buffer=20)[0] == pytest.approx(value)
    assert overlong.score("", "x" * length, {}, most=100, buffer=20, penalty=0.5)[0] == pytest.approx(value / 2)
    assert overlong.score("", "x " * length, {}, most=100, buffer=20, unit="words")[0] == pytest.approx(value)


@pytest.mark.parametrize(
    ("completion", "args", "value"),
    [
        ("a b a b", {"n": 2}, -1 / 3),  # ab, ba, ab: one of three
        ("a a a a", {"n": 1}, -3 / 4),
        ("a b c d", {"n": 2}, 0.0),
        ("a", {"n": 2}, 0.0),
        ("", {}, 0.0),
        ("a a a a", {"n": 1, "penalty": 2.0}, -1.5),
        ("a a a a", {"n": 1, "free": 0.5}, -0.5),  # (3/4 - 1/2) / (1 - 1/2)
        ("a b a b", {"n": 2, "free": 0.5}, 0.0),
    ],
)
def test_repetition_costs_the_share_of_n_grams_said_before(completion: str, args: dict[str, Any], value: float) -> None:
    assert repetition.score("", completion, {}, **args)[0] == pytest.approx(value)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("exact", {"ignore_case": "yes"}, "ignore_case='yes': input should be a valid boolean"),
    ("exact", {"fields": 1}, "does not fit"),
    ("last_number", {"tolerance": -1.0}, "tolerance=-1.0: input should be greater than or equal to 0"),
    ("last_number", {"tolerance": float("nan")}, "tolerance=nan"),
    ("regex", {"pattern": "("}, "not a regular expression"),
    ("regex", {"pattern": 5}, "pattern=5"),
    ("regex", {}, "pattern"),
    ("length", {"most": 5, "least": 6}, "least <= most"),
    ("length", {"most": -1}, "most=-1"),
    ("length", {"most": 5, "unit": "tokens"}, "unit='tokens'"),
    ("overlong", {"most": 5, "buffer": 6}, "buffer=6 must be at most most=5"),
    ("overlong", {"most": 5, "buffer": 0}, "buffer=0"),
    ("repetition", {"n": 0}, "n=0"),
    ("repetition", {"free": 1.0}, "free=1.0"),
    ("format", {"sections": []}, "sections=.. must be one or more"),
    ("format", {"sections": ["a", "a"]}, "sections=.'a', 'a'. must be"),
    ("format", {"sections": ["<a>"]}, "must be one or more different tag names"),
    ("format", {"sections": "think"}, "sections='think'"),
    ("json_schema", {}, "exactly one of schema"),
    ("json_schema", {"schema": CITY, "field": "s"}, "exactly one of schema"),
    ("json_schema", {"schema": {"type": "what"}}, "schema: type"),
    ("json_schema", {"schema": {"$ref": "http://elsewhere"}}, "nothing is fetched"),
    ("reasoning_gym", {"dataset": "chain_sum", "extract": "middle"}, "extract='middle'"),
]


@pytest.mark.parametrize(("use", "args", "words"), REFUSED, ids=[f"{use}-{i}" for i, (use, _, _) in enumerate(REFUSED)])
def test_a_bad_configuration_is_refused_at_load_in_one_line(use: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as told:
        registry.load(use, args)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", scorers.NAMES)
def test_every_built_in_scorer_says_what_it_does_and_where_it_ends(name: str) -> None:
    import importlib

    module = importlib.import_module(f"reward_server.scorers.{name}")
    words = module.score.__doc__
    assert "Example:" in words and "Limits:" in words and words.partition("\n")[0].endswith(".")
