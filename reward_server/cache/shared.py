"""Scores in Redis, shared by reward servers. It only ever helps: a Redis that is slow, gone or full of nonsense costs hits, never a score.

    get ──▶ asked ──▶ one MGET for all that came meanwhile ──▶ found(Scored | None)
    put ──▶ kept  ──▶ one pipeline of SET … EX                 (bounded; what does not fit is counted and left out)

One task. consumes: `asked`, `kept`. produces: calls of `found`. waits for: `_work`. unblocked by: `get`, `put`, `stop`.
After a failure nothing is asked for a while (REST_S): questions are answered "not there" at once, so nobody waits for a dead Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from reward_server.outcome import Scored, checked

log = logging.getLogger("headrace.reward_server.cache")

SCHEMA = 1
PREFIX = b"headrace:score:"
LIMIT_S = 0.25  # for one round trip
REST_S = 1.0
MAX_KEPT = 20_000
_ROUND_ITEMS = 1_000

Found = Callable[[Scored | None], None]


class SharedCache:
    """Example: `cache = SharedCache("redis://127.0.0.1:6379/0", password="", ttl_s=86400); await cache.start(); cache.get(key, print)`"""

    def __init__(self, url: str, *, password: str, ttl_s: int) -> None:
        self._ttl_s = ttl_s
        # One failure is one failure: the client's own retries would hold everybody up behind a dead server.
        self._redis: Any = redis.asyncio.from_url(
            url, password=password or None, socket_timeout=LIMIT_S, socket_connect_timeout=LIMIT_S, retry=Retry(NoBackoff(), 0), retry_on_error=[]
        )
        self._asked: list[tuple[bytes, Found]] = []
        self._kept: deque[tuple[bytes, Scored]] = deque()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rests_until_s = 0.0
        self.num_hits = 0
        self.num_failures = 0  # round trips that failed
        self.num_left_out = 0  # scores that were not kept

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def get(self, key: bytes, found: Found) -> None:
        """`found` is called once, at once when Redis is not to be asked now."""
        if self._rests():
            found(None)
            return
        self._asked.append((key, found))
        self._work.set()

    def put(self, key: bytes, scored: Scored) -> None:
        """Keeps a score soon."""
        if self._rests() or len(self._kept) >= MAX_KEPT:
            self.num_left_out += 1
            return
        self._kept.append((key, scored))
        self._work.set()

    async def stop(self) -> None:
        """What was asked is answered "not there"."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._answer(self._take_asked(), [])
        await self._redis.aclose()

    def _rests(self) -> bool:
        return asyncio.get_running_loop().time() < self._rests_until_s

    def _take_asked(self) -> list[tuple[bytes, Found]]:
        taken, self._asked = self._asked[:_ROUND_ITEMS], self._asked[_ROUND_ITEMS:]
        return taken

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            asked = self._take_asked()
            kept = [self._kept.popleft() for _ in range(min(_ROUND_ITEMS, len(self._kept)))]
            if not asked and not kept:
                self._work.clear()
                continue
            values: list[Any] = []
            try:
                async with asyncio.timeout(LIMIT_S):
                    values = await self._round(asked, kept)
            except (RedisError, OSError, TimeoutError) as error:
                self._failed(error, len(kept))
                asked += self._take_asked()
                values = []
            finally:
                self._answer(asked, values)

    async def _round(self, asked: list[tuple[bytes, Found]], kept: list[tuple[bytes, Scored]]) -> list[Any]:
        """One round trip. Returns what is there for each key asked."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for key, scored in kept:
                pipeline.set(PREFIX + key, encode(scored), ex=self._ttl_s)
            if asked:
                pipeline.mget([PREFIX + key for key, _ in asked])
            answers = await pipeline.execute()
        return list(answers[-1]) if asked else []

    def _answer(self, asked: list[tuple[bytes, Found]], values: list[Any]) -> None:
        for place, (_, found) in enumerate(asked):
            scored = decode(values[place]) if place < len(values) and values[place] is not None else None
            self.num_hits += scored is not None
            found(scored)

    def _failed(self, error: Exception, num_kept: int) -> None:
        self.num_failures += 1
        self.num_left_out += num_kept
        self._rests_until_s = asyncio.get_running_loop().time() + REST_S
        log.warning("the shared cache is not asked for %g s: %s; scores are computed instead", REST_S, str(error) or type(error).__name__)


def encode(scored: Scored) -> bytes:
    """As it is kept in Redis."""
    packed: bytes = msgpack.packb([SCHEMA, scored.value, dict(scored.parts)])
    return packed


def decode(data: bytes) -> Scored | None:
    """None for what this version cannot read, and for what is no finite score: Redis may hold anything."""
    try:
        schema, value, parts = msgpack.unpackb(data)
        outcome = checked((value, parts)) if schema == SCHEMA else None
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return outcome if isinstance(outcome, Scored) else None
