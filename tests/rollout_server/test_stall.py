"""When an engine counts as wedged, and how many tokens a second it draws."""

from __future__ import annotations

from rollout_server.stall import Rate, Stall


def test_only_time_without_a_token_while_requests_run_and_no_update_counts() -> None:
    stall = Stall()
    looks = [  # at, running, drawn, paused -> seconds
        (0, 2, 10, False, 0),
        (5, 2, 10, False, 5),
        (7, 3, 10, False, 7),  # a new request is no sign of life
        (8, 3, 11, False, 0),  # a token is
        (20, 3, 11, True, 0),  # an update has a deadline of its own
        (30, 3, 11, False, 10),
        (40, 0, 11, False, 0),  # nothing to do
        (45, 1, 11, False, 5),
        (46, 1, 3, False, 0),  # another life of the engine
    ]
    for at, running, drawn, paused, seconds in looks:
        assert stall.seconds(at, num_running=running, num_drawn=drawn, paused=paused) == seconds


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    rate = Rate()
    assert rate.per_s is None
    for at, drawn in ((0, 0), (5, 100), (10, 500)):
        rate.look(at, drawn)
    assert rate.per_s == 50  # 500 in 10 s
    for at, drawn in ((15, 600), (20, 600)):
        rate.look(at, drawn)
    assert rate.per_s == 10  # 100 in the 10 s since 10
    rate.look(21, 5)  # a new life
    assert rate.per_s is None
