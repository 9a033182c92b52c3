"""When an upstream is left alone, and when it gets its probes."""

from __future__ import annotations

import pytest

from reward_server.endpoints.breaker import LONGEST_OPEN_S, Breaker, BreakerRule, State


def failed(breaker: Breaker, *times_s: float) -> None:
    for time_s in times_s:
        breaker.failure(time_s, is_probe=breaker.begin(time_s))


def opened() -> Breaker:
    """Open from second 2 to second 4, with two probes after that."""
    breaker = Breaker(rule=BreakerRule(failures=3, open_s=2.0, probes=2))
    failed(breaker, 0.0, 1.0, 2.0)
    return breaker


def test_so_many_failures_in_a_row_open_it_for_open_s() -> None:
    breaker = Breaker(rule=BreakerRule(failures=3, open_s=2.0))
    failed(breaker, 0.0, 1.0)
    assert breaker.state(1.0) is State.CLOSED and breaker.allows(1.0)
    failed(breaker, 2.0)
    assert [breaker.state(at) for at in (2.0, 3.9, 4.0)] == [State.OPEN, State.OPEN, State.HALF_OPEN]
    assert [breaker.allows(at) for at in (2.0, 3.9, 4.0)] == [False, False, True]
    assert breaker.opens_again_s(2.0) == 4.0 and breaker.num_opened == 1


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker(rule=BreakerRule(failures=3))
    failed(breaker, 0.0, 1.0)
    breaker.success(is_probe=breaker.begin(1.5))
    failed(breaker, 2.0, 3.0)
    assert breaker.state(3.0) is State.CLOSED


def test_half_of_the_last_results_failing_opens_it_though_never_three_in_a_row() -> None:
    breaker = Breaker(rule=BreakerRule(failures=3, share=0.5, window=4))
    for time_s in (0.0, 1.0):  # F S F S: two of four, but the newest is a success, which opens nothing
        failed(breaker, time_s)
        breaker.success(is_probe=breaker.begin(time_s))
    assert breaker.state(2.0) is State.CLOSED
    failed(breaker, 2.0)  # S F S F: two of four
    assert breaker.state(2.0) is State.OPEN


def test_half_open_lets_two_probes_go_and_closes_once_both_succeeded() -> None:
    breaker = opened()
    first, second = breaker.begin(4.0), breaker.begin(4.0)
    assert first and second and not breaker.allows(4.0)
    breaker.success(is_probe=True)
    assert breaker.state(4.1) is State.HALF_OPEN and breaker.allows(4.1)
    breaker.success(is_probe=True)
    assert breaker.state(4.2) is State.CLOSED


def test_a_probe_that_fails_opens_it_twice_as_long_up_to_a_minute() -> None:
    breaker = opened()
    now_s, lasted_s = 4.0, []
    for _ in range(6):
        failed(breaker, now_s)
        lasted_s.append(breaker.opens_again_s(now_s) - now_s)
        now_s = breaker.opens_again_s(now_s)
    assert lasted_s == [4.0, 8.0, 16.0, 32.0, LONGEST_OPEN_S, LONGEST_OPEN_S]


def test_an_abandoned_probe_gives_its_place_back_and_says_nothing() -> None:
    breaker = opened()
    probes = [breaker.begin(4.0), breaker.begin(4.0)]
    for is_probe in probes:
        breaker.abandoned(is_probe=is_probe)
    assert breaker.allows(4.0) and breaker.state(4.0) is State.HALF_OPEN


@pytest.mark.parametrize("late", ["success", "failure"])
def test_the_end_of_a_call_begun_before_it_opened_changes_nothing(late: str) -> None:
    breaker = Breaker(rule=BreakerRule(failures=1, open_s=2.0))
    early = breaker.begin(0.0)
    failed(breaker, 0.0)
    if late == "success":
        breaker.success(is_probe=early)
    else:
        breaker.failure(1.0, is_probe=early)
    assert breaker.state(1.9) is State.OPEN and breaker.state(2.0) is State.HALF_OPEN and breaker.num_opened == 1
