"""What an endpoint is given: how to speak, and every rule of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reward_server.endpoints.batching import BatchRule
from reward_server.endpoints.breaker import BreakerRule
from reward_server.endpoints.hedging import HedgeRule
from reward_server.endpoints.limiter import Limits
from reward_server.endpoints.retrying import RetryRule
from reward_server.endpoints.waiting import Call
from reward_server.outcome import Outcome


class Dialect(Protocol):
    """How calls are put to an upstream. Knows nothing of retries, limits and clocks."""

    async def ask(self, address: str, calls: Sequence[Call], limit_s: float) -> Sequence[Outcome]:
        """An outcome for each call, in order. Raises Failed. Cancelled: closes what it opened, so that the other side may stop."""

    async def close(self) -> None:
        """Closes its connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Every rule of one endpoint.

    Example: `Policy(limit_s=10.0, attempt_s=5.0, limits=Limits(rate_per_s=10.0))`
    """

    limit_s: float  # wall clock from `submit` to the answer
    attempt_s: float  # wall clock of one attempt
    limits: Limits = field(default_factory=Limits)
    retry: RetryRule = field(default_factory=RetryRule)
    hedge: HedgeRule = field(default_factory=HedgeRule)
    breaker: BreakerRule = field(default_factory=BreakerRule)
    batch: BatchRule = field(default_factory=BatchRule)
    queue_items: int = 4096
    queue_bytes: int = 256 << 20
