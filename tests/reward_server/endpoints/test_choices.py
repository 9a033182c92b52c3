"""Hedges, upstreams, batch sizes and the order of waiting calls: small machines that are told the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reward_server.endpoints.batching import Batching, BatchRule
from reward_server.endpoints.breaker import BreakerRule
from reward_server.endpoints.hedging import HedgeRule, Hedging
from reward_server.endpoints.upstreams import Upstream, Upstreams
from reward_server.endpoints.waiting import Call, Waiting

# -- hedging


def test_an_attempt_is_late_at_the_measured_95th_percentile() -> None:
    hedging = Hedging(rule=HedgeRule(quantile=0.95, least_samples=20))
    for number in range(1, 20):
        hedging.measured(number / 100)
    assert hedging.after_s() is None  # 19 of 20
    hedging.measured(0.20)
    assert hedging.after_s() == 0.19  # the 19th of 20: 95 % are not above it


def test_hedges_are_at_most_a_share_of_attempts() -> None:
    hedging = Hedging(rule=HedgeRule(share=0.1))
    assert hedging.take() and not hedging.take()  # one saved at the start
    taken = 0
    for _ in range(100):
        hedging.called()
        taken += hedging.take()
    assert taken in (9, 10) and hedging.num_hedges == taken + 1  # 100 · 0.1, less what rounding leaves over


def test_a_share_of_nothing_hedges_nothing() -> None:
    hedging = Hedging(rule=HedgeRule(share=0.0, least_samples=1))
    hedging.measured(1.0)
    assert hedging.after_s() is None


# -- upstreams


def two(draws: list[float], rule: BreakerRule | None = None) -> tuple[Upstreams, Upstream, Upstream]:
    taken = iter(draws)
    made = Upstreams(["a", "b"], rule or BreakerRule(), draw=lambda: next(taken, 0.0))
    return made, made.all[0], made.all[1]


def finish(upstream: Upstream, took_s: float) -> None:
    upstream.succeeded(took_s, is_probe=upstream.begin(0.0))


def test_the_faster_of_two_is_taken_and_the_busier_one_left_alone() -> None:
    upstreams, a, b = two([])
    finish(a, 0.2)
    finish(b, 0.3)
    assert upstreams.choose(0.0) is a  # 0.2 · 1 against 0.3 · 1
    a.begin(0.0)
    assert upstreams.choose(0.0) is b  # 0.2 · 2 against 0.3 · 1


def test_one_that_fails_half_the_time_promises_twice_as_long() -> None:
    upstreams, a, b = two([])
    finish(a, 0.2)
    finish(b, 0.3)
    a.health = 0.5  # 0.2 / 0.5 against 0.3
    assert upstreams.choose(0.0) is b


def test_an_open_breaker_takes_it_out_and_a_hedge_goes_elsewhere_where_it_can() -> None:
    upstreams, a, b = two([], BreakerRule(failures=1, open_s=5.0))
    assert upstreams.choose(0.0, without=(a,)) is b
    b.failed(1.0, is_ailing=True, is_probe=b.begin(1.0))
    assert upstreams.choose(1.0) is a and upstreams.choose(1.0, without=(a,)) is a
    a.failed(2.0, is_ailing=True, is_probe=a.begin(2.0))
    assert upstreams.choose(2.0) is None and upstreams.opens_again_s(2.0) == 6.0  # b's
    assert upstreams.choose(6.0) is b


def test_while_probes_are_under_way_there_is_no_time_to_wait_for() -> None:
    upstreams, a, b = two([], BreakerRule(failures=1, open_s=5.0, probes=1))
    for each in (a, b):
        each.failed(0.0, is_ailing=True, is_probe=each.begin(0.0))
        each.begin(5.0)
    assert upstreams.choose(5.0) is None and upstreams.opens_again_s(5.0) is None


# -- batches


def test_a_batch_grows_while_answers_come_in_time_and_shrinks_when_not() -> None:
    batching = Batching(rule=BatchRule(most=10, target_s=1.0))
    assert batching.size == 8
    batching.took(8, 0.5)
    assert batching.size == 9
    batching.took(3, 0.1)  # says nothing of nine
    assert batching.size == 9
    batching.took(9, 1.5)
    assert batching.size == 6  # 9 · 0.7 = 6.3
    batching.too_much(6)
    assert batching.size == 4  # 6.3 · 0.7 = 4.41
    for _ in range(20):
        batching.took(10, 0.1)
    assert batching.size == 10
    for _ in range(20):
        batching.too_much(10)
    assert batching.size == 1


@pytest.mark.parametrize(
    ("num_waiting", "num_running", "expected_s"),
    [(1, 0, 0.0), (8, 3, 0.0), (1, 3, 0.006)],  # nothing is under way; a full batch; came 4 ms ago and waits 10
)
def test_a_call_waits_for_company_only_while_others_are_under_way(num_waiting: int, num_running: int, expected_s: float) -> None:
    batching = Batching(rule=BatchRule(most=10, wait_s=0.01))
    assert batching.wait_s(1.004, num_waiting=num_waiting, oldest_s=1.0, num_running=num_running) == pytest.approx(expected_s)


# -- waiting calls

MakeCall = Callable[..., Call]


def call(name: str, *, priority: int = 0, is_alone: bool = False) -> Call:
    made = Call(owner="o", prompt="", completion=name, fields=b"", priority=priority, came_s=0.0, deadline_s=9.0, answer=lambda outcome: None)
    made.is_alone = is_alone
    return made


def names(calls: list[Call]) -> str:
    return "".join(each.completion for each in calls)


def filled(*calls: Call, **bounds: Any) -> Waiting:
    waiting = Waiting(**{"max_items": 10, "max_bytes": 100, **bounds})
    for each in calls:
        assert waiting.push(each) == []
    return waiting


def test_the_more_urgent_go_first_and_equals_in_the_order_they_came() -> None:
    waiting = filled(call("a"), call("b"), call("c", priority=1), call("d", priority=-1))
    assert names(waiting.take(0.0, 3, 100)) == "cab" and names(waiting.take(0.0, 3, 100)) == "d"


def test_a_full_queue_turns_a_call_away_unless_a_less_urgent_one_can_go() -> None:
    waiting = filled(call("a"), call("b"), max_items=2)
    assert names(waiting.push(call("c"))) == "c"
    assert names(waiting.push(call("d", priority=1))) == "b"  # the newest of the least urgent
    assert names(waiting.take(0.0, 9, 100)) == "da" and waiting.num_items == 0


def test_bytes_are_bounded_but_for_a_call_that_is_alone() -> None:
    waiting = filled(call("a" * 200), max_bytes=100)
    assert len(waiting.push(call("b"))) == 1
    waiting.take(0.0, 1, 100)
    assert waiting.num_bytes == 0 and waiting.push(call("b")) == []


def test_a_batch_holds_no_more_bytes_than_it_may_but_one_call_in_any_case() -> None:
    waiting = filled(call("aaa"), call("bb"), call("c"), max_bytes=100)
    assert names(waiting.take(0.0, 9, 2)) == "aaa" and names(waiting.take(0.0, 9, 2)) == "bb"


def test_a_call_put_back_waits_for_its_time_and_then_goes_before_later_ones() -> None:
    waiting = filled(call("a"))
    (a,) = waiting.take(0.0, 1, 100)
    waiting.put_back(a, 5.0)
    waiting.push(call("b"))
    waiting.push(call("c"))
    assert waiting.wakes_s() == 5.0 and names(waiting.take(4.9, 1, 100)) == "b"
    assert names(waiting.take(5.0, 9, 100)) == "ac" and waiting.wakes_s() is None


def test_a_call_that_is_alone_shares_no_batch() -> None:
    waiting = filled(call("a"), call("b", is_alone=True), call("c"))
    assert [names(waiting.take(0.0, 9, 100)) for _ in range(4)] == ["a", "b", "c", ""]


def test_calls_that_are_over_are_passed_by_and_cost_no_room() -> None:
    a, b = call("a"), call("b")
    waiting = filled(a, b, max_items=2)
    waiting.over(a)
    assert waiting.push(call("c")) == []
    assert waiting.oldest(0.0) is b and names(waiting.take(0.0, 9, 100)) == "bc"
    waiting.put_back(b, 5.0)
    waiting.over(b)
    assert waiting.wakes_s() is None and waiting.num_items == 0 and waiting.num_bytes == 0
