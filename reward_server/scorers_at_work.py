"""One generation of configured scorers and what they run on: the pool of processes, the remote endpoints."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_server.cache.key import Scope
from reward_server.endpoints.endpoint import Endpoint
from reward_server.pool import Pool
from reward_server.scorer import Answer, Kind, Scorer, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessScorer:
    """A function in the pool's processes."""

    pool: Pool
    index: int
    kind: Kind = "process"

    @property
    def description(self) -> str:
        return self.pool.accounts[self.index].description

    @property
    def limit_s(self) -> float:
        return self.pool.accounts[self.index].spec.limit_s

    @property
    def version(self) -> str:
        """Digest of the file that the function is defined in."""
        return self.pool.accounts[self.index].version

    @property
    def is_deterministic(self) -> bool:
        """Whether the function gives the same score for the same item, as it says itself."""
        return self.pool.accounts[self.index].is_deterministic

    def submit(self, work: Work, answer: Answer) -> None:
        self.pool.submit(scorer=self.index, owner=work.owner, prompt=work.prompt, completion=work.completion, fields=work.fields, answer=answer)


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
        self, scorers: Mapping[str, Scorer], *, pool: Pool | None, endpoints: Sequence[Endpoint], cached: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.scorers = scorers
        self.pool = pool  # None: no scorer runs in a process here
        self.endpoints = endpoints
        self.on_ask: Callable[[str, Work, Answer], None] = self._submit
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
        if name not in self._scopes:
            scorer = self.scorers[name]
            allowed = name in self._cached and not (isinstance(scorer, ProcessScorer) and not scorer.is_deterministic)
            self._scopes[name] = Scope(name, scorer.version if isinstance(scorer, ProcessScorer) else "", self._cached[name]) if allowed else None
        return self._scopes[name]

    def _submit(self, name: str, work: Work, answer: Answer) -> None:
        self.scorers[name].submit(work, answer)

    async def start(self) -> None:
        """Raises ValueError in one line when scorers cannot be loaded. Endpoints need not be there: their calls wait and are tried again."""
        if self.pool is not None:
            await self.pool.start()

    def forget(self, owner: Hashable) -> None:
        """Drops an owner's calls and stops the work on them."""
        if self.pool is not None:
            self.pool.forget(owner)
        for endpoint in self.endpoints:
            endpoint.forget(owner)

    async def stop(self) -> None:
        if self.pool is not None:
            await self.pool.stop()
        for endpoint in self.endpoints:
            await endpoint.stop()
