"""The ledger together with its journal: every mutation is journaled in order, and answers wait until it is on the disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from learner.gateway.account import Record
from learner.gateway.appends import Appends, Key
from learner.gateway.bell import Bell
from learner.gateway.evaluation import Evaluations
from learner.gateway.ledger import Ledger
from learner.gateway.segments import Position
from learner.gateway.unscored import UnscoredShare


class Books:
    """`bell` rings whenever the account changed, so that whoever waits for room or for a batch looks again.

    payloads: where the payload of each sample lies that may still be needed. failure: set once the journal takes nothing more;
    the account in memory is ahead of the disk then, so the process must end. unusable: why samples could not be trained on, since the start.
    evaluations: their own account, in the same journal.
    """

    def __init__(self, ledger: Ledger, journal: Appends, evaluations: Evaluations | None = None, *, max_unscored_share: float | None = None) -> None:
        self.ledger = ledger
        self.evaluations = evaluations or Evaluations()
        self.journal = journal
        self.bell = Bell()
        self.payloads: dict[Key, Position] = {}
        self.unusable: Counter[str] = Counter()
        self.stopped: Counter[str] = Counter()  # samples not waited for, by why their group was decided without them
        self.progress: Counter[str] = Counter()  # reports kept; samples that were lent again with a part, and the tokens of those parts
        self.unscored = UnscoredShare(most=max_unscored_share)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: asyncio.Future[Any] | None = None

    def commit(self, record: Record | None, payload: bytes = b"") -> asyncio.Future[Position]:
        """Queues a record that the ledger made just now; None is no mutation and waits for those before it."""
        if record is None:
            return self.barrier()
        return self._committed(self.journal.append(record, payload))

    def barrier(self) -> asyncio.Future[Any]:
        """Done when everything committed so far is on the disk."""
        if self._last is None:
            self._last = asyncio.get_running_loop().create_future()
            self._last.set_result(Position(0, 0))
        return self._last

    def commit_samples(self, samples: Sequence[tuple[Key, Record, bytes]]) -> asyncio.Future[Any]:
        """Samples' records with their payloads, which can be read back once they are on the disk. Without samples, as `barrier`."""
        if not samples:
            return self.barrier()
        future = self.journal.append_all([(record, payload) for _, record, payload in samples])
        keys = [key for key, _, _ in samples]

        def note(future: asyncio.Future[list[Position]]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.payloads.update(zip(keys, future.result(), strict=True))

        future.add_done_callback(note)
        return self._committed(future)

    def _committed(self, future: asyncio.Future[Any]) -> asyncio.Future[Any]:
        self._last = future
        future.add_done_callback(self._check)
        self.bell.ring()
        return future

    def read(self, keys: Iterable[Key], chunk_bytes: int) -> Iterator[list[bytes | memoryview]]:
        """Payloads in order, about chunk_bytes at a time; blocks on the disk, so it runs in a thread. Raises JournalDamaged."""
        chunk: list[bytes | memoryview] = []
        left = chunk_bytes
        for payload in self.journal.payloads([self.payloads[key] for key in keys]):
            chunk.append(payload)
            left -= len(payload)
            if left <= 0:
                yield chunk
                chunk, left = [], chunk_bytes
        if chunk:
            yield chunk

    def forget_payloads(self) -> None:
        """Forgets payloads that nothing needs any more."""
        needed = set(self.ledger.retained())
        self.payloads = {key: position for key, position in self.payloads.items() if key in needed}

    def _check(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)
