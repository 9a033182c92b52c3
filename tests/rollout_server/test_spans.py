from __future__ import annotations

import pytest

from rollout_server.spans import Span, SpanTrack


def test_five_tokens_under_3_and_four_under_4_are_labelled_so_even_when_5_came_later() -> None:
    # faults.md 34
    track = SpanTrack(3)
    track.switch(4, num_tokens=5)
    track.switch(5, num_tokens=9)  # after the last token: it drew nothing
    assert track.spans(9) == (Span(version=3, start=0, end=5), Span(version=4, start=5, end=9))


def test_a_request_that_waited_through_an_update_has_one_span() -> None:
    track = SpanTrack(1)
    track.switch(2, num_tokens=0)
    assert track.spans(3) == (Span(version=2, start=0, end=3),)


def test_two_updates_between_the_same_tokens_leave_only_the_later() -> None:
    track = SpanTrack(1)
    track.switch(2, num_tokens=4)
    track.switch(3, num_tokens=4)
    assert track.spans(6) == (Span(version=1, start=0, end=4), Span(version=3, start=4, end=6))


def test_no_tokens_have_no_spans() -> None:
    assert SpanTrack(7).spans(0) == ()


def test_versions_only_rise() -> None:
    with pytest.raises(AssertionError, match="versions only rise"):
        SpanTrack(4).switch(4, num_tokens=1)
