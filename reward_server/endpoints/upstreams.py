"""Which of an endpoint's upstreams gets the next attempt: of two drawn at random, the one that promises to answer sooner. Pure.

Two random choices are nearly as good as the best one and never send all callers to the same place (Mitzenmacher 2001, "The power of two
choices in randomized load balancing"). What an upstream promises: running mean latency × (attempts under way + 1) ÷ running share of successes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from reward_server.endpoints.breaker import Breaker, BreakerRule, State

_WEIGHT = 0.2  # of the newest result in running means
_LEAST_HEALTH = 0.02


@dataclass(kw_only=True, slots=True, eq=False)
class Upstream:
    """One address and what was seen of it."""

    address: str
    breaker: Breaker
    health: float = 1.0  # running share of successes
    latency_s: float = 0.0  # running mean of successes; 0: none yet
    num_running: int = 0
    num_attempts: int = 0
    num_failures: int = 0

    @property
    def promise_s(self) -> float:
        """Expected seconds to an answer; smaller is better. An upstream not yet heard of promises nearly nothing and gets tried."""
        return max(self.latency_s, 1e-3) * (self.num_running + 1) / max(self.health, _LEAST_HEALTH)

    def begin(self, now_s: float) -> bool:
        """An attempt begins. Returns whether it is a probe of the breaker."""
        self.num_running += 1
        self.num_attempts += 1
        return self.breaker.begin(now_s)

    def succeeded(self, took_s: float, *, is_probe: bool) -> None:
        self.num_running -= 1
        self.health += _WEIGHT * (1.0 - self.health)
        self.latency_s = took_s if not self.latency_s else self.latency_s + _WEIGHT * (took_s - self.latency_s)
        self.breaker.success(is_probe=is_probe)

    def failed(self, now_s: float, *, is_ailing: bool, is_probe: bool) -> None:
        """is_ailing: whether the failure speaks against its health."""
        self.num_running -= 1
        self.num_failures += 1
        if is_ailing:
            self.health -= _WEIGHT * self.health
            self.breaker.failure(now_s, is_probe=is_probe)
        else:
            self.breaker.abandoned(is_probe=is_probe)

    def abandoned(self, *, is_probe: bool) -> None:
        """An attempt was cancelled: nobody waits for it any more."""
        self.num_running -= 1
        self.breaker.abandoned(is_probe=is_probe)


class Upstreams:
    """Example: `Upstreams(["http://a/score", "http://b/score"], BreakerRule(), draw=random.random)`"""

    def __init__(self, addresses: Sequence[str], rule: BreakerRule, *, draw: Callable[[], float]) -> None:
        self.all = [Upstream(address=address, breaker=Breaker(rule=rule)) for address in addresses]
        self._draw = draw

    def choose(self, now_s: float, *, without: Collection[Upstream] = ()) -> Upstream | None:
        """The upstream of the next attempt; None: every breaker is open. `without` is avoided where another one is there."""
        allowed = [each for each in self.all if each.breaker.allows(now_s)]
        fresh = [each for each in allowed if each not in without] or allowed
        if not fresh:
            return None
        first = fresh[int(self._draw() * len(fresh))]
        rest = [each for each in fresh if each is not first]
        second = rest[int(self._draw() * len(rest))] if rest else first
        return first if first.promise_s <= second.promise_s else second

    def opens_again_s(self, now_s: float) -> float | None:
        """While `choose` gives none: when the first may be called again, on the same clock; None: once a probe that is under way has ended."""
        if any(each.breaker.state(now_s) is State.HALF_OPEN for each in self.all):
            return None
        return min(each.breaker.opens_again_s(now_s) for each in self.all)
