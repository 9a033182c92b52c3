"""One generation of configured scorers and what they run on: the pool of processes, the remote endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_server.cache.key import Scope
from reward_server.config import ScorerConfig
from reward_server.endpoints.endpoint import Endpoint
from reward_server.pool import Pool
from reward_server.pooled import ProcessScorer
from reward_server.scorer import Answer, Kind, Scorer, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteScorer:
    """An endpoint elsewhere."""

    endpoint: Endpoint
    kind: Kind
    description: str

    @property
    def limit_s(self) -> float:
        return self.endpoint.policy.limit_s

    def submit(self, work: Work, answer: Answer) -> None:
        self.endpoint.submit(owner=work.owner, prompt=work.prompt, completion=work.completion, fields=work.fields, priority=work.priority, answer=answer)


class ScorersAtWork:
    """Example: `ScorersAtWork({"sums": ProcessScorer(pool=pool, index=0)}, pool=pool, endpoints=())`

    cached: configuration of each scorer whose scores may be kept; others are always computed.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        *,
        pool: Pool | None,
        endpoints: Sequence[Endpoint],
        own_pools: Sequence[Pool] = (),
        cached: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.scorers = scorers
        self.pool = pool  # None: no scorer runs in a process here
        self.own_pools = own_pools  # of scorers that have a process to themselves
        self.endpoints = endpoints
        self.on_ask: Callable[[str, Work, Answer], None] = self._submit
        self.sources: Mapping[str, ScorerConfig] = {}  # what each was made of
        self.num_looking = 0  # items for which a cache is being asked before they come here
        self._cached = cached or {}
        self._scopes: dict[str, Scope | None] = {}

    def with_combined(self, combined: Mapping[str, Scorer]) -> ScorersAtWork:
        """Adds scorers that ask the others; they need this object to be made."""
        self.scorers = {**self.scorers, **combined}
        return self

    def ask(self, name: str, work: Work, answer: Answer) -> None:
        """For combined scorers: one of the others, by way of whoever has these scorers at work."""
        self.on_ask(name, work, answer)

    def scope(self, name: str) -> Scope | None:
        """What a scorer's cached scores are kept under; None: they are not. The version of a function is known once a process has loaded it."""
        scorer = self.scorers[name]
        if isinstance(scorer, ProcessScorer) and not scorer.is_deterministic:
            return None
        if name not in self._scopes:
            version = scorer.version if isinstance(scorer, ProcessScorer) else ""
            self._scopes[name] = Scope(name, version, self._cached[name]) if name in self._cached else None
        return self._scopes[name]

    def _pools(self) -> list[Pool]:
        return [*self.own_pools] if self.pool is None else [self.pool, *self.own_pools]

    def _submit(self, name: str, work: Work, answer: Answer) -> None:
        self.scorers[name].submit(work, answer)

    async def start(self) -> None:
        """Raises ValueError in one line when scorers cannot be loaded. Endpoints need not be there: their calls wait and are tried again."""
        await asyncio.gather(*(pool.start() for pool in self._pools()))

    def forget(self, owner: Hashable) -> None:
        """Drops an owner's calls and stops the work on them."""
        for pool in self._pools():
            pool.forget(owner)
        for endpoint in self.endpoints:
            endpoint.forget(owner)

    def is_idle(self, *, keep: Collection[Endpoint] = ()) -> bool:
        """Whether nothing is left to be answered, endpoints that others use left out."""
        return not self.num_looking and all(pool.is_idle for pool in self._pools()) and all(each.is_idle for each in self.endpoints if each not in keep)

    async def stop(self, *, keep: Collection[Endpoint] = ()) -> None:
        """Ends processes and calls, but for endpoints that others use, too."""
        for pool in self._pools():
            await pool.stop()
        for endpoint in self.endpoints:
            if endpoint not in keep:
                await endpoint.stop()
