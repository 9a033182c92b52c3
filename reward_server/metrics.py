"""The figures of a reward server (docs/metrics.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protos.exporting import Figure
from protos.gpus import Gpus
from protos.resources import resource_figures
from reward_server.endpoints.breaker import State
from reward_server.endpoints.endpoint import Endpoint
from reward_server.endpoints.upstreams import Upstream
from reward_server.judge import JudgeScorer
from reward_server.plane import Plane
from reward_server.scorers_at_work import RemoteScorer

_BREAKER = {State.CLOSED: 0.0, State.HALF_OPEN: 0.5, State.OPEN: 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the figures are read of."""

    plane: Plane
    num_pending: Callable[[], int]
    num_refused: Callable[[], int]
    gpus: Gpus


def _endpoints(seen: Seen) -> Iterator[tuple[str, Endpoint]]:
    for name, scorer in seen.plane.scorers.items():
        if isinstance(scorer, (RemoteScorer, JudgeScorer)):
            yield name, scorer.endpoint


def _each(read: Callable[[Endpoint], float]) -> Callable[[Seen], dict[str, float | None]]:
    return lambda seen: {name: read(endpoint) for name, endpoint in _endpoints(seen)}


def _each_upstream(read: Callable[[Upstream], float]) -> Callable[[Seen], dict[tuple[str, str], float | None]]:
    return lambda seen: {(name, upstream.address): read(upstream) for name, endpoint in _endpoints(seen) for upstream in endpoint.upstreams.all}


def _answers(seen: Seen) -> dict[tuple[str, str], float | None]:
    found: dict[tuple[str, str], float | None] = {}
    for name, tally in seen.plane.tallies.items():
        found[name, "scored"] = tally.num_answered - tally.unscored.total()
        found |= {(name, reason): count for reason, count in tally.unscored.items()}
    return found


def _breaker(upstream: Upstream) -> float:
    return _BREAKER[upstream.breaker.state(asyncio.get_running_loop().time())]


def _pool(seen: Seen) -> dict[str, float | None]:
    pools = [pool for pool in (seen.plane.at_work.pool, *seen.plane.at_work.own_pools) if pool is not None]
    return {"queued": sum(pool.num_queued for pool in pools), "running": sum(pool.num_busy for pool in pools)}


_UPSTREAM = ("scorer", "upstream")
FIGURES: tuple[Figure[Seen], ...] = (
    Figure(name="headrace_reward_answers_total", kind="counter", labels=("scorer", "outcome"), text="Answers by scorer: scored, or why not; cached ones included.", read=_answers),
    Figure(name="headrace_reward_cached_answers_total", kind="counter", labels=("scorer",), text="Of these, answers that came from memory.", read=lambda s: {name: tally.num_cached for name, tally in s.plane.tallies.items()}),
    Figure(name="headrace_reward_pending_items", kind="gauge", text="Items read from callers and not answered.", read=lambda s: s.num_pending()),
    Figure(name="headrace_reward_process_items", kind="gauge", labels=("state",), text="Items of scorers in processes: calls queued, and processes at work.", read=_pool),
    Figure(name="headrace_reward_cache_bytes", kind="gauge", text="Memory that kept scores take.", read=lambda s: s.plane.caches.memory.num_bytes if s.plane.caches.memory is not None else None),
    Figure(name="headrace_reward_cache_items", kind="gauge", text="Scores kept in memory.", read=lambda s: len(s.plane.caches.memory) if s.plane.caches.memory is not None else None),
    Figure(name="headrace_reward_cache_evicted_items_total", kind="counter", text="Scores that made room for others.", read=lambda s: s.plane.caches.memory.num_evicted if s.plane.caches.memory is not None else None),
    Figure(name="headrace_reward_attempts_total", kind="counter", labels=_UPSTREAM, text="Calls of an upstream of a remote scorer.", read=_each_upstream(lambda u: u.num_attempts)),
    Figure(name="headrace_reward_failed_attempts_total", kind="counter", labels=_UPSTREAM, text="Of these, those that failed.", read=_each_upstream(lambda u: u.num_failures)),
    Figure(name="headrace_reward_upstream_seconds", kind="gauge", labels=_UPSTREAM, text="Running mean of an upstream's time to answer.", read=_each_upstream(lambda u: u.latency_s)),
    Figure(name="headrace_reward_breaker_ratio", kind="gauge", labels=_UPSTREAM, text="Circuit breaker: 0 closed, 0.5 half open, 1 open.", read=_each_upstream(_breaker)),
    Figure(name="headrace_reward_breaker_openings_total", kind="counter", labels=_UPSTREAM, text="How often it opened.", read=_each_upstream(lambda u: u.breaker.num_opened)),
    Figure(name="headrace_reward_retries_total", kind="counter", labels=("scorer",), text="Calls made again after a failure.", read=_each(lambda e: e.retrying.num_retries)),
    Figure(name="headrace_reward_hedges_total", kind="counter", labels=("scorer",), text="Second calls beside a slow first one.", read=_each(lambda e: e.hedging.num_hedges)),
    Figure(name="headrace_reward_overloads_total", kind="counter", labels=("scorer",), text="Answers of an upstream that it has too much to do.", read=_each(lambda e: e.limiter.num_refused)),
    Figure(name="headrace_reward_waiting_items", kind="gauge", labels=("scorer",), text="Items that wait for a call of a remote scorer.", read=_each(lambda e: e.waiting.num_items)),
    Figure(name="headrace_reward_running_calls", kind="gauge", labels=("scorer",), text="Calls of a remote scorer under way.", read=_each(lambda e: e.num_running)),
    Figure(name="headrace_reward_refused_calls_total", kind="counter", text="Calls and connections without this run's token or TLS.", read=lambda s: s.num_refused()),
    *resource_figures("reward", lambda s: s.gpus),
)
