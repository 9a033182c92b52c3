"""Rates, means and speeds of figures over a time."""

from __future__ import annotations

import pytest

from learner.watch.window import Window, labels

A, B = labels(replica="a"), labels(replica="b")


def window(*readings: tuple[float, dict]) -> Window:
    made = Window({"x": 100.0})
    for at_s, values in readings:
        made.add(at_s, {"x": values})
    return made


def test_speed_is_the_increase_over_the_time_it_took_and_a_fall_is_a_reset() -> None:
    seen = window((0, {A: 5.0}), (10, {A: 25.0}), (20, {A: 4.0, B: 1.0}), (30, {A: 10.0, B: 3.0}))
    assert seen.speed("x", 100) == {A: pytest.approx(30 / 30), B: pytest.approx(0.2)}  # a: 20 + 4 + 6; b: 2 in 10 s
    assert seen.speed("x", 10) == {A: pytest.approx(0.6), B: pytest.approx(0.2)}
    assert seen.speed("x", 5) == {}  # one reading


def test_rate_of_a_young_counter_is_of_the_whole_time_as_prometheus_has_it() -> None:
    seen = window((0, {A: 0.0}), (10, {A: 10.0}), (20, {A: 20.0}))
    # 20 in 20 s; it began at 0, so nothing is added before, and nothing after: 20 over 100 s
    assert seen.rate("x", 100) == {A: pytest.approx(0.2)}
    old = window((0, {A: 1000.0}), (10, {A: 1010.0}), (20, {A: 1020.0}))
    # its zero lies far back: half a pause of 10 s is added before, so 20 · 25/20 over 100 s
    assert old.rate("x", 100) == {A: pytest.approx(0.25)}


def test_mean_is_of_the_moments_at_which_there_was_a_value() -> None:
    seen = window((0, {A: 1.0}), (10, {}), (20, {A: 4.0}), (30, {A: 7.0}))
    assert seen.mean("x", 100) == {A: 4.0}
    assert seen.mean("x", 10, ago_s=10) == {A: 4.0}  # at 10 and 20
    assert seen.newest("x") == {A: 7.0}


def test_what_nobody_looks_back_at_is_forgotten() -> None:
    seen = Window({"x": 20.0})
    for at_s in range(0, 1000, 10):
        seen.add(float(at_s), {"x": {A: 1.0}, "unasked": {A: 1.0}})
    assert len(seen._kept["x"]) == 3 and "unasked" not in seen._kept
