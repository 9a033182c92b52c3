"""Whether a failed call is tried again, and after how long. Pure.

Waits are drawn evenly from [0, first_wait_s · 2^attempts] ("full jitter"), so that callers that failed together do not come back
together. A budget keeps retries to a share of all calls: where everything fails, load grows by that share and not by a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reward_server.endpoints.failures import Failed

_BUDGET_CALLS = 100.0  # as many calls' worth of retries may be saved up


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryRule:
    """Bounds of retrying.

    Example: `RetryRule(retries=3, refusals=20, first_wait_s=0.1, longest_wait_s=5.0, share=0.5)`
    """

    retries: int = 3  # after failures
    refusals: int = 20  # after answers that say "overloaded, come later"; these cost no retry
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    share: float = 0.5  # of calls, over time


@dataclass(kw_only=True, slots=True)
class Retrying:
    """The budget of one endpoint. `draw` gives numbers in [0, 1)."""

    rule: RetryRule
    draw: Callable[[], float]
    num_retries: int = 0
    num_denied: int = 0  # not made for lack of budget
    _saved: float = 10.0  # retries that may be made: a new endpoint is not starved by its first failures

    def called(self) -> None:
        """A call came: it adds its share."""
        self._saved = min(_BUDGET_CALLS * self.rule.share, self._saved + self.rule.share)

    def wait_s(self, failed: Failed, *, num_failures: int, num_refusals: int, left_s: float) -> float | None:
        """Seconds until the next attempt; None: there is none.

        num_failures, num_refusals: of this call, the present one included. left_s: until the call's deadline.
        """
        if not failed.is_retryable:
            return None
        if failed.kind == "overloaded":
            if num_refusals > self.rule.refusals:
                return None
            wait_s = (failed.retry_after_s or 0.0) + self._jitter_s(num_refusals)
        else:
            if num_failures > self.rule.retries:
                return None
            wait_s = self._jitter_s(num_failures)
        if wait_s >= left_s:
            return None
        if failed.kind != "overloaded":
            if self._saved < 1.0:
                self.num_denied += 1
                return None
            self._saved -= 1.0
        self.num_retries += 1
        return wait_s

    def _jitter_s(self, number: int) -> float:
        return self.draw() * min(self.rule.longest_wait_s, self.rule.first_wait_s * 2.0 ** (number - 1))
