"""What a process notes of its transfers."""

from __future__ import annotations

import time

import pytest

from protos.weights import marks


def test_pieces_are_told_once_in_the_order_in_which_they_ended_also_those_that_failed() -> None:
    marks.taken()
    before = time.monotonic()
    with pytest.raises(ZeroDivisionError), marks.span("outer"), marks.span("inner"):
        raise ZeroDivisionError
    found = marks.taken()
    assert [name for name, _, _ in found] == ["inner", "outer"] and marks.taken() == []
    (_, inner_began, inner_ended), (_, outer_began, outer_ended) = found
    assert before <= outer_began <= inner_began <= inner_ended <= outer_ended <= time.monotonic()


def test_where_nobody_asks_the_oldest_are_forgotten() -> None:
    marks.taken()
    for number in range(marks.MAX_SPANS + 1):
        with marks.span(str(number)):
            pass
    found = marks.taken()
    assert len(found) == marks.MAX_SPANS and found[0][0] == "1"
