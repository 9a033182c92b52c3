"""The asyncio layer over a dialect that does what a test says: one entry of `plan` for each attempt, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from reward_server.endpoints.batching import BatchRule
from reward_server.endpoints.breaker import BreakerRule
from reward_server.endpoints.endpoint import Endpoint
from reward_server.endpoints.failures import Failed
from reward_server.endpoints.hedging import HedgeRule
from reward_server.endpoints.limiter import Limits
from reward_server.endpoints.policy import Policy
from reward_server.endpoints.retrying import RetryRule
from reward_server.endpoints.waiting import Call
from reward_server.outcome import Outcome, Scored, Unscored

BROKEN = Failed("error", "HTTP 500", is_retryable=True, is_ailing=True)
REFUSED = Failed("refused", "HTTP 400", is_retryable=False)


class Plan:
    """A dialect. Step: a Failed is raised, a number of seconds is slept first, None answers. Beyond the plan: answers at once."""

    def __init__(self, *steps: Failed | float | None) -> None:
        self.steps = list(steps)
        self.attempts: list[tuple[str, list[str]]] = []  # (address, completions)
        self.num_running = 0
        self.most_running = 0
        self.num_cancelled = 0
        self.is_closed = False

    async def ask(self, address: str, calls: Sequence[Call], limit_s: float) -> list[Outcome]:
        self.attempts.append((address, [call.completion for call in calls]))
        step = self.steps.pop(0) if self.steps else None
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if isinstance(step, float):
                await asyncio.sleep(step)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if isinstance(step, Failed):
            raise step
        if any(call.completion == "poison" for call in calls):
            raise REFUSED
        return [Scored(value=float(len(call.completion))) for call in calls]

    async def close(self) -> None:
        self.is_closed = True


class Subject:
    """An endpoint under test: `await subject.score("abc")` is its outcome."""

    def __init__(self, plan: Plan, addresses: Sequence[str], rules: dict[str, Any]) -> None:
        given = {"limit_s": 2.0, "attempt_s": 1.0, "retry": RetryRule(first_wait_s=0.01), "hedge": HedgeRule(share=0.0), **rules}
        self.plan = plan
        self.endpoint = Endpoint("far", plan, addresses, Policy(**given), draw=lambda: 0.5)

    def score(self, completion: str = "1", owner: str = "owner", priority: int = 0) -> asyncio.Future[Outcome]:
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.endpoint.submit(owner=owner, prompt="", completion=completion, fields=b"", priority=priority, answer=answered.set_result)
        return answered


MakeSubject = Callable[..., Subject]


@pytest.fixture
async def make() -> AsyncIterator[MakeSubject]:
    subjects: list[Subject] = []

    def made(*steps: Failed | float | None, addresses: Sequence[str] = ("a",), **rules: Any) -> Subject:
        subjects.append(Subject(Plan(*steps), addresses, rules))
        return subjects[-1]

    yield made
    for subject in subjects:
        await subject.endpoint.stop()
        assert subject.plan.num_running == 0 and subject.plan.is_closed


async def test_a_failure_that_may_pass_is_tried_again_and_one_that_may_not_is_told(make: MakeSubject) -> None:
    subject = make(BROKEN, BROKEN)
    assert await subject.score("abc") == Scored(value=3.0) and len(subject.plan.attempts) == 3
    subject = make(REFUSED)
    assert await subject.score() == Unscored("HTTP 400", "refused") and len(subject.plan.attempts) == 1


async def test_retries_are_bounded_and_the_last_failure_is_told(make: MakeSubject) -> None:
    subject = make(*[BROKEN] * 9, retry=RetryRule(retries=2, first_wait_s=0.01), breaker=BreakerRule(failures=99))
    assert await subject.score() == Unscored("HTTP 500 (attempt 3)", "error") and len(subject.plan.attempts) == 3


async def test_an_attempt_that_hangs_is_cut_at_its_own_limit_and_tried_again(make: MakeSubject) -> None:
    subject = make(60.0, attempt_s=0.1)
    assert await subject.score() == Scored(value=1.0)
    assert subject.plan.num_cancelled == 1 and subject.endpoint.upstreams.all[0].num_failures == 1


async def test_a_call_ends_at_its_deadline_whatever_its_attempts_do(make: MakeSubject) -> None:
    subject = make(*[60.0] * 9, limit_s=0.3, attempt_s=0.2)
    outcome = await subject.score()
    assert isinstance(outcome, Unscored) and outcome.reason == "timeout" and "limit_s=0.3" in outcome.detail
    await asyncio.sleep(0)
    assert subject.plan.num_running == 0


async def test_work_that_nobody_waits_for_is_cancelled_and_the_rest_goes_on(make: MakeSubject) -> None:
    # faults.md 126
    subject = make(60.0, 0.2, limits=Limits(concurrency=2), batch=BatchRule(most=1))
    gone, stays, queued = subject.score("a", owner="gone"), subject.score("bb", owner="stays"), subject.score("ccc", owner="gone")
    await asyncio.sleep(0.05)
    subject.endpoint.forget("gone")
    await asyncio.sleep(0.05)
    assert subject.plan.num_cancelled == 1 and not gone.done() and not queued.done()
    assert await stays == Scored(value=2.0) and len(subject.plan.attempts) == 2  # the queued one never went
    assert subject.endpoint.num_running == 0 and subject.endpoint.waiting.num_items == 0


async def test_a_batch_goes_on_while_somebody_waits_for_any_of_it(make: MakeSubject) -> None:
    subject = make(0.2, batch=BatchRule(most=8))
    gone, stays = subject.score("a", owner="gone"), subject.score("bb", owner="stays")
    await asyncio.sleep(0.05)
    subject.endpoint.forget("gone")
    assert await stays == Scored(value=2.0) and not gone.done() and subject.plan.num_cancelled == 0


async def test_a_batch_refused_whole_is_asked_one_by_one_so_that_only_the_bad_call_pays(make: MakeSubject) -> None:
    subject = make(batch=BatchRule(most=8))
    outcomes = await asyncio.gather(*map(subject.score, ("a", "poison", "bbb")))
    assert outcomes == [Scored(value=1.0), Unscored("HTTP 400", "refused"), Scored(value=3.0)]
    assert [calls for _, calls in subject.plan.attempts] == [["a", "poison", "bbb"], ["a"], ["poison"], ["bbb"]]


async def test_no_more_attempts_are_under_way_than_concurrency_allows(make: MakeSubject) -> None:
    subject = make(*[0.02] * 12, limits=Limits(concurrency=3), batch=BatchRule(most=1))
    assert len(await asyncio.gather(*(subject.score() for _ in range(12)))) == 12
    assert subject.plan.most_running == 3


async def test_a_late_attempt_is_made_a_second_time_elsewhere_and_the_first_answer_counts(make: MakeSubject) -> None:
    subject = make(60.0, addresses=("a", "b"), hedge=HedgeRule(share=1.0, least_samples=20))
    for _ in range(20):
        subject.endpoint.hedging.measured(0.05)
    assert await subject.score() == Scored(value=1.0)
    await asyncio.sleep(0)
    assert {address for address, _ in subject.plan.attempts} == {"a", "b"} and subject.plan.num_cancelled == 1
    assert (subject.endpoint.hedging.num_hedges, subject.endpoint.hedging.num_won) == (1, 1) and subject.endpoint.num_running == 0


async def test_a_hedged_call_fails_only_when_both_attempts_have(make: MakeSubject) -> None:
    subject = make(0.2, BROKEN, hedge=HedgeRule(share=1.0, least_samples=1))
    subject.endpoint.hedging.measured(0.05)
    assert await subject.score() == Scored(value=1.0) and len(subject.plan.attempts) == 2
    assert subject.endpoint.hedging.num_won == 0 and subject.endpoint.retrying.num_retries == 0


async def test_a_hedge_waits_for_no_slot(make: MakeSubject) -> None:
    subject = make(0.2, limits=Limits(concurrency=1), hedge=HedgeRule(share=1.0, least_samples=1))
    subject.endpoint.hedging.measured(0.05)
    assert await subject.score() == Scored(value=1.0) and len(subject.plan.attempts) == 1


async def test_an_open_breaker_lets_calls_wait_for_its_probe_when_their_time_allows_it(make: MakeSubject) -> None:
    subject = make(*[BROKEN] * 2, breaker=BreakerRule(failures=2, open_s=0.15, probes=1), batch=BatchRule(most=1))
    assert await asyncio.gather(*(subject.score("ab") for _ in range(4))) == [Scored(value=2.0)] * 4
    assert subject.endpoint.upstreams.all[0].breaker.num_opened == 1


async def test_an_open_breaker_answers_at_once_when_no_probe_comes_in_time(make: MakeSubject) -> None:
    subject = make(*[BROKEN] * 9, limit_s=0.5, breaker=BreakerRule(failures=1, open_s=5.0))
    began_s = asyncio.get_running_loop().time()
    outcomes = [await subject.score(), await subject.score()]
    assert [isinstance(each, Unscored) and each.reason for each in outcomes] == ["breaker_open"] * 2
    assert asyncio.get_running_loop().time() - began_s < 0.4 and len(subject.plan.attempts) == 1


async def test_a_full_queue_and_limits_that_let_nothing_begin_are_overload(make: MakeSubject) -> None:
    subject = make(60.0, limit_s=0.3, queue_items=1, limits=Limits(rate_per_s=1.0), batch=BatchRule(most=1))
    first = subject.score()
    await asyncio.sleep(0.01)
    second, third = subject.score(), subject.score()
    outcomes = [await each for each in (first, second, third)]
    assert [isinstance(each, Unscored) and each.reason for each in outcomes] == ["timeout", "overloaded", "overloaded"]
    assert "queue_items" in str(outcomes[2]) and "no attempt could begin" in str(outcomes[1])


async def test_the_urgent_go_first(make: MakeSubject) -> None:
    subject = make(0.05, limits=Limits(concurrency=1), batch=BatchRule(most=1))
    first = subject.score("first")
    await asyncio.sleep(0.01)
    others = [subject.score("low", priority=-1), subject.score("usual"), subject.score("high", priority=1)]
    await asyncio.gather(first, *others)
    assert [calls[0] for _, calls in subject.plan.attempts] == ["first", "high", "usual", "low"]


async def test_a_defect_of_the_dialect_is_an_error_and_not_the_end(make: MakeSubject) -> None:
    subject = make(ZeroDivisionError("a defect"))  # type: ignore[arg-type]  # the defect is the point
    subject.plan.ask = _defect  # type: ignore[method-assign]
    assert await subject.score() == Unscored("ZeroDivisionError: a defect", "error")
    subject.plan.ask = _too_few  # type: ignore[method-assign]
    assert await subject.score() == Unscored("AssertionError: 0 outcomes of 1 calls", "error")


async def _too_few(address: str, calls: Sequence[Call], limit_s: float) -> list[Outcome]:
    return []


async def _defect(address: str, calls: Sequence[Call], limit_s: float) -> list[Outcome]:
    raise ZeroDivisionError("a defect")
