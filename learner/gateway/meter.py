"""Numbers about the data path between two batches: what was waited for, and by whom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from learner.gateway.ledger import Ledger
from learner.gateway.replicas import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """As FeedStats of feed.proto: waits, idle share, tokens and staleness are since the batch before; the account's are totals."""

    trainer_wait_s: float
    replica_idle_share: float  # mean over replicas, 0 to 1
    num_open: int
    num_waiting: int
    oldest_open_s: float
    num_dropped: dict[str, int]
    num_leased: int
    num_trained: int
    num_generated_tokens: int
    num_replicas: int
    tokens_by_staleness: dict[int, int]
    staleness_bound: int = 0  # that groups are admitted under now


NO_STATS = Stats(
    trainer_wait_s=0.0, replica_idle_share=0.0, num_open=0, num_waiting=0, oldest_open_s=0.0, num_dropped={}, num_leased=0, num_trained=0,
    num_generated_tokens=0, num_replicas=0, tokens_by_staleness={},
)  # fmt: skip


class Meter:
    """Remembers what replicas had done at the last reading."""

    def __init__(self) -> None:
        self._read_s = time.monotonic()
        self._before: dict[tuple[str, int], tuple[int, float]] = {}  # member to (tokens, idle seconds)

    def read(self, ledger: Ledger, attending: Sequence[Replica], *, trainer_wait_s: float, tokens_by_staleness: dict[int, int]) -> Stats:
        """The numbers now; the next reading counts from here."""
        tokens, idle_share = self._replicas(attending)
        counts, opened_at = ledger.counts(), ledger.oldest_opened_at
        return Stats(
            trainer_wait_s=trainer_wait_s,
            replica_idle_share=idle_share,
            num_open=counts.open,
            num_waiting=counts.waiting,
            oldest_open_s=0.0 if opened_at is None else max(0.0, time.time() - opened_at),
            num_dropped=counts.dropped,
            num_leased=counts.leased,
            num_trained=counts.trained,
            num_generated_tokens=tokens,
            num_replicas=len(attending),
            tokens_by_staleness=tokens_by_staleness,
            staleness_bound=ledger.bound,
        )

    def _replicas(self, attending: Sequence[Replica]) -> tuple[int, float]:
        """(tokens drawn, mean idle share) since the last reading; a replica that is new counts its tokens only."""
        now_s = time.monotonic()
        elapsed_s, self._read_s = max(now_s - self._read_s, 1e-9), now_s
        num_tokens, shares = 0, []
        for replica in attending:
            tokens, idle_s = self._before.get(replica.member, (0, None))
            num_tokens += max(0, replica.num_tokens - tokens)
            if idle_s is not None:
                shares.append(min(1.0, max(0.0, (replica.idle_s - idle_s) / elapsed_s)))
        self._before = {replica.member: (replica.num_tokens, replica.idle_s) for replica in attending}
        return num_tokens, sum(shares) / len(shares) if shares else 0.0
