"""The JSON line of benchmarks, and how pairs are measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import _line
from benchmarks._line import Bar


def test_a_bar_passes_on_its_own_side_and_not_without_a_number() -> None:
    assert Bar(name="x", value=0.75, op=">=", bar=0.75).passed and not Bar(name="x", value=0.749, op=">=", bar=0.75).passed
    assert Bar(name="x", value=2, op="<=", bar=2).passed and not Bar(name="x", value=2.1, op="<=", bar=2).passed
    assert not Bar(name="x", value=float("nan"), op="<=", bar=2).passed


def test_pairs_are_interleaved_and_turn_round() -> None:
    calls: list[str] = []

    def called(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    measures = {"a": lambda: called("a"), "b": lambda: called("b")}
    pairs = _line.interleaved(measures, num_pairs=6)
    assert "".join(calls) == "abba" * 3
    assert pairs[1] == {"a": 4.0, "b": 3.0}
    with pytest.raises(ValueError, match="num_pairs=5: a median needs at least 6 pairs"):
        _line.interleaved(measures, num_pairs=5)


def test_a_ratio_is_the_median_of_ratios_within_pairs() -> None:
    """Ratios 2, 3, 10: the median is 3; the ratio of medians would be 6 / 2 = 3.0 of other pairs, 20 / 2."""
    pairs = [{"a": 4.0, "b": 2.0}, {"a": 6.0, "b": 2.0}, {"a": 20.0, "b": 2.0}]
    assert _line.ratio(pairs, "a", "b") == 3.0


def test_a_missed_bar_is_in_the_line_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    bars = [Bar(name="good", value=1, op=">=", bar=1), Bar(name="bad", value=0.12345678, op=">=", bar=1)]
    _line.report("some", bars=bars, pairs=[{"a": 1.0}], packages=("pytest",), quiet=True)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(line) == ["name", "passed", "bars", "pairs", "machine", "versions", "commit"]
    assert line["passed"] is False
    assert line["bars"][1] == {"name": "bad", "value": 0.1235, "op": ">=", "bar": 1, "passed": False}


def test_each_pair_is_told_as_it_comes_and_none_begins_after_the_end() -> None:
    told: list[_line.Pair] = []
    assert _line.interleaved({"a": lambda: 1.0}, num_pairs=6, seen=told.append) == told == [{"a": 1.0}] * 6
    assert _line.interleaved({"a": lambda: 1.0}, num_pairs=6, until_s=0.0) == []


def test_a_run_that_left_bars_out_has_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    _line.report("some", bars=[], pairs=[], packages=(), quiet=True, finished=False)
    assert json.loads(capsys.readouterr().out)["passed"] is False
