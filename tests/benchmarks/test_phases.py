"""What a piece of an update is charged with, by hand. Seconds in, milliseconds out."""

from __future__ import annotations

import pytest

from benchmarks import _phases

ENDS = [0.0, 0.010, 0.020, 0.060, 0.070]  # gaps of 10, 10, 40, 10 ms: the median is 10


def test_a_piece_is_charged_with_its_share_of_the_gaps_that_it_touches() -> None:
    # The gap 20..60 has an excess of 30; "digest" covers 30..60 of it, three quarters: 22.5. "load" covers 5..25: 5 of that gap, an eighth: 3.75.
    found = _phases.charges(ENDS, [("digest", 0.030, 0.060), ("load", 0.005, 0.015), ("load", 0.015, 0.025)])
    assert list(found) == ["load", "digest"]
    assert found["digest"] == {"took_ms": 30.0, "times": 1, "charged_ms": 22.5, "longest_gap_ms": 40.0, "median_gap_ms": 40.0}
    assert found["load"] == {"took_ms": 20.0, "times": 2, "charged_ms": 3.75, "longest_gap_ms": 40.0, "median_gap_ms": 10.0}


def test_a_piece_outside_every_step_is_charged_with_nothing() -> None:
    assert _phases.charges(ENDS, [("late", 1.0, 2.0)])["late"] == {"took_ms": 1000.0, "times": 1, "charged_ms": 0.0, "longest_gap_ms": 0.0, "median_gap_ms": 0.0}
    assert _phases.charges([0.0], [("late", 1.0, 2.0)]) == {} and _phases.longest([0.0], [("late", 1.0, 2.0)]) == []


def test_the_longest_gaps_come_first_with_what_ran_in_them() -> None:
    first, *rest = _phases.longest(ENDS, [("digest", 0.030, 0.060), ("load", 0.005, 0.025)])
    assert first == {"at_ms": 15.0, "gap_ms": 40.0, "pieces_ms": {"digest": 30.0, "load": 5.0}}  # the first piece begins at 5
    assert len(rest) == 3


def test_lost_time_is_what_the_median_pace_would_have_filled() -> None:
    # 20..60 at a pace of 10 ms makes one step where four would fit: 30 ms lost; of its second half, 15.
    assert _phases.lost_s(ENDS, 0.0, 0.070) == pytest.approx(0.030)
    assert _phases.lost_s(ENDS, 0.040, 0.060) == pytest.approx(0.015)
