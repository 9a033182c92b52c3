"""Which failures are tried again, when, and how often at most."""

from __future__ import annotations

from typing import Any

import pytest

from reward_server.endpoints.failures import Failed, of_status, retry_after_s
from reward_server.endpoints.retrying import Retrying, RetryRule

BROKEN = Failed("error", "HTTP 500", is_retryable=True)
BUSY = Failed("overloaded", "HTTP 429", is_retryable=True, retry_after_s=1.0)
RULE = RetryRule(retries=3, refusals=2, first_wait_s=0.1, longest_wait_s=0.5, share=0.5)


def wait_s(failed: Failed, draw: float = 0.5, num_failures: int = 1, num_refusals: int = 0, left_s: float = 10.0) -> float | None:
    return Retrying(rule=RULE, draw=lambda: draw).wait_s(failed, num_failures=num_failures, num_refusals=num_refusals, left_s=left_s)


@pytest.mark.parametrize(
    ("num_failures", "expected"),
    [(1, 0.05), (2, 0.1), (3, 0.2), (4, None)],  # half of 0.1, 0.2, 0.4; the fourth failure is the last
)
def test_waits_double_and_end_with_the_retries(num_failures: int, expected: float | None) -> None:
    assert wait_s(BROKEN, num_failures=num_failures) == pytest.approx(expected)


def test_waits_are_drawn_from_zero_and_bounded() -> None:
    assert wait_s(BROKEN, draw=0.0) == 0.0
    rule = RetryRule(retries=10, longest_wait_s=0.5)
    assert Retrying(rule=rule, draw=lambda: 1.0).wait_s(BROKEN, num_failures=10, num_refusals=0, left_s=10.0) == 0.5


@pytest.mark.parametrize(("num_refusals", "expected"), [(1, 1.05), (2, 1.1), (3, None)])
def test_a_wish_to_wait_is_kept_jittered_upwards_and_costs_no_retry(num_refusals: int, expected: float | None) -> None:
    assert wait_s(BUSY, num_failures=99, num_refusals=num_refusals) == pytest.approx(expected)


def test_nothing_is_tried_again_that_could_not_be_answered_in_time() -> None:
    assert wait_s(BUSY, num_refusals=1, left_s=1.05) is None
    assert wait_s(BROKEN, left_s=0.05) is None


def test_what_would_fail_again_is_not_tried_again() -> None:
    assert wait_s(Failed("refused", "HTTP 400", is_retryable=False)) is None


def test_retries_cost_a_budget_that_calls_fill() -> None:
    # ten saved at the start, then one for each two calls
    retrying = Retrying(rule=RULE, draw=lambda: 0.0)
    made = [retrying.wait_s(BROKEN, num_failures=1, num_refusals=0, left_s=1.0) for _ in range(12)]
    assert made == [0.0] * 10 + [None] * 2 and (retrying.num_retries, retrying.num_denied) == (10, 2)
    for _ in range(4):
        retrying.called()
    made = [retrying.wait_s(BROKEN, num_failures=1, num_refusals=0, left_s=1.0) for _ in range(3)]
    assert made == [0.0, 0.0, None]


@pytest.mark.parametrize(
    ("status", "retry_after", "kind", "is_retryable", "is_ailing", "expected_s"),
    [
        (429, "1", "overloaded", True, False, 1.0),
        (429, None, "overloaded", True, False, None),
        (503, "0.5", "overloaded", True, False, 0.5),
        (503, None, "error", True, True, None),
        (500, None, "error", True, True, None),
        (502, "7", "error", True, True, None),
        (501, None, "error", False, True, None),
        (408, None, "error", True, False, None),
        (400, None, "refused", False, False, None),
        (401, None, "refused", False, False, None),
        (404, "3", "refused", False, False, None),
        (302, None, "refused", False, False, None),
    ],
)
def test_a_status_says_what_kind_of_failure_it_is(status: int, retry_after: str | None, kind: str, is_retryable: bool, is_ailing: bool, expected_s: Any) -> None:
    failed = of_status(status, "words", retry_after, now_epoch_s=0.0)
    assert (failed.kind, failed.is_retryable, failed.is_ailing, failed.retry_after_s) == (kind, is_retryable, is_ailing, expected_s)
    assert failed.detail == f"HTTP {status}: words"


@pytest.mark.parametrize(
    ("value", "expected_s"),
    [
        (None, None), ("2", 2.0), ("0.25", 0.25), ("-3", 0.0), ("1e9", 3600.0), ("nan", None), ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),  # second 100, asked at second 10
        ("Thu, 01 Jan 1970 00:00:05 GMT", 0.0),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(value: str | None, expected_s: float | None) -> None:
    assert retry_after_s(value, now_epoch_s=10.0) == expected_s
