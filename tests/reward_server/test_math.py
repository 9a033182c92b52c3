r"""The math scorer: roles fixed, golds whole, equations as equations (faults.md 100, 103, 104, 105)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reward_server import registry
from reward_server.outcome import Scored, Unscored
from reward_server.scorers import math
from reward_server.scorers.boxed import final_boxes
from tests.reward_server.conftest import MakeCalls, spec

EQUAL = [
    ("1/3", r"so \boxed{\frac{2}{6}}"),
    (5, r"\boxed{5.0}"),
    ("5", "The final answer is 5."),
    ("x=5", r"\boxed{5}"),
    ("5", r"\boxed{x=5}"),
    ("5", r"\boxed{2 + 3 = 5}"),
    ("1,000", r"\boxed{1000}"),
    (r"$\frac{1}{2}$", "It is 0.5"),
    (r"$m \ge \sqrt{2}$", r"\boxed{[\sqrt{2}, \infty)}"),  # faults.md 103: the gold goes first
    ("1331 and 1728", r"\boxed{1728} and \boxed{1331}"),
    ("1331 and 1728", r"\boxed{1331, 1728}"),
    ("3x-y+13=0", r"\boxed{y = 3x + 13}"),
    ("3x-y+13=0", r"\boxed{6x - 2y + 26 = 0}"),
    ("(x+1)^2", r"\boxed{x^2 + 2x + 1}"),
    (["7", "8"], r"\boxed{8}"),
    ("55", r"\boxed{\sum_{n=1}^{10} n = 55}"),
    (r"$\sum_{n=1}^{\infty} \frac{1}{n^3}$", r"\boxed{\sum_{n=1}^{\infty} \frac{1}{n^3}}"),
    ("$2^{2^{10}}$", r"\boxed{2^{1024}}"),
    ("A", r"\boxed{A}"),
    (r"\boxed{12}", "12"),
]
DIFFERENT = [
    ("1331 and 1728", r"\boxed{1728}"),  # faults.md 104: a part of the answer is not the answer
    ("1728", r"\boxed{1331, 1728}"),
    (r"$[\sqrt2,\infty)$", r"\boxed{m \ge \sqrt{2}}"),  # faults.md 103: a relation is no interval unless the gold is the relation
    ("3x-y+13=0", r"\boxed{3x+4y+14=0}"),  # faults.md 105: both end in "= 0"
    ("0", r"\boxed{3x+4y+14=0}"),
    ("13", r"\boxed{3x - y = 13}"),
    ("3x-y+13=0", r"\boxed{0}"),
    ("5", "4 + 5 = 9"),
    ("5", ""),
    ("5", r"\boxed{}"),
    ("5", r"\boxed{6}, not 5"),
    ("(1,2]", r"\boxed{[1,2]}"),
]


@pytest.mark.parametrize(("gold", "completion"), EQUAL)
def test_equal_answers_score_one(gold: Any, completion: str) -> None:
    assert math.score("", completion, {"answer": gold}) == 1.0


@pytest.mark.parametrize(("gold", "completion"), DIFFERENT)
def test_other_answers_score_zero(gold: Any, completion: str) -> None:
    assert math.score("", completion, {"answer": gold}) == 0.0


@pytest.mark.parametrize("gold", ["Paris", "", "   ", "the number 5", r"$\frac{1}{$", "x" * 3000, ["5", "Paris"]])
def test_a_gold_answer_that_is_no_mathematics_is_a_bad_reference_and_not_zero_for_ever(gold: Any) -> None:
    outcome = math.score("", r"\boxed{5}", {"answer": gold})  # faults.md 105
    assert isinstance(outcome, Unscored) and outcome.reason == "bad_reference" and "answer" in outcome.detail


def test_a_record_without_gold_is_refused_and_a_missing_box_is_wrong_where_one_is_asked_for() -> None:
    assert math.score("", "5", {}).reason == "refused"  # type: ignore[union-attr]
    assert math.score("", "5", {"answer": 5}, require_boxed=True) == 0.0
    assert math.score("", r"\boxed{5}", {"answer": 5}, require_boxed=True) == 1.0


def test_digits_say_how_near_a_written_decimal_must_be() -> None:
    # 1/3 = 0.333333...: 0.333 agrees to 3 places, and not to 6
    assert math.score("", r"\boxed{0.333}", {"answer": "1/3"}, digits=3) == 1.0
    assert math.score("", r"\boxed{0.333}", {"answer": "1/3"}) == 0.0


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{1}", ["1"]),
        (r"\boxed{\frac{1}{2}} so", [r"\frac{1}{2}"]),
        (r"\boxed{1} ... \boxed{2} and $\boxed{3}$", ["2", "3"]),
        (r"\boxed{1} or \boxed{2}", ["1", "2"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{5} then \boxed{6", ["5"]),
        ("none", []),
        (r"\boxed{" * 50, []),
    ],
)
def test_boxes_are_read_by_counting_braces(text: str, boxes: list[str]) -> None:
    assert final_boxes(text) == boxes


HOSTILE = {
    "braces": "{" * 900 + "1" + "}" * 900,
    "parentheses": "(" * 900 + "1" + ")" * 900,
    "fractions": r"\frac{1}{" * 150 + "1" + "}" * 150,
    "a tower": "99^{99^{99}}",
    "a factorial": "10000000!",
    "a sum": r"\sum_{n=1}^{100000000} \frac{1}{n^3}",
    "many terms": "(a+b+c+d+e+f)^{40}",
    "a long number": "9" * 1900,
    "too long": "1+" * 5_000_000 + "1",
    "null bytes": "\0" * 1000,
    "half a pair": "\ud800",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(20)
def test_a_hostile_answer_is_wrong_and_not_waited_for(answer: str) -> None:
    assert math.score("", rf"\boxed{{{answer}}}", {"answer": "5"}) == 0.0


async def test_sixteen_calls_at_once_through_processes_all_score_one(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("math", limit_s=20.0), workers=2)  # faults.md 100
    outcomes = await asyncio.wait_for(calls.all(0, [r"\boxed{\frac{1}{3}}"] * 16, {"answer": "1/3"}), 40)
    assert outcomes == [Scored(value=1.0)] * 16


def test_an_argument_of_the_wrong_type_or_out_of_bounds_is_refused_at_load() -> None:
    for args, words in (({"digits": 0}, "digits=0"), ({"digits": "6"}, "digits='6'"), ({"require_boxed": 1}, "require_boxed=1"), ({"boxes": 2}, "boxes")):
        with pytest.raises(ValueError, match=words):
            registry.load("math", args)


def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r'pip install "\.\[reward-math\]"'):
        registry.load("math", {})
