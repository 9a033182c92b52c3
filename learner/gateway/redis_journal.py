"""The journal in Redis Streams, for a gateway whose machine may be lost with its disk.

    headrace:{RUN}:journal   the stream; an entry's id is EPOCH-N, chosen here: sent again after a lost answer, it is not added twice
    headrace:{RUN}:fence     hash: schema; epoch, which every opening raises; holder, the process that opened it last
    headrace:{RUN}:alive     expires unless its holder renews it: a second gateway is refused while it is there
    headrace:{RUN}:places    hash: "GROUP/SAMPLE" to the id of the entry with its payload

Every write is one script that first compares the epoch, so a gateway that was replaced while it was stopped or cut off cannot write.
A batch is one script call, so Redis has all of it or nothing. While Redis is away the writer tries again for ever and appends wait.
The consumer group `cuts` stands at the last entry that a cut covers: its lag is what only the journal has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgpack
import redis
from isal.isal_zlib import crc32, crc32_combine

from learner import holder
from learner.gateway import redis_client, redis_scripts
from learner.gateway.appends import Appends, Item, JournalFailed, JournalLocked, Key
from learner.gateway.segments import Entry, JournalDamaged, Position
from protos import faultpoints

_log = logging.getLogger("headrace.gateway.journal")
SCHEMA = 1
GROUP = "cuts"
PAGE = 256  # entries of one answer while reading
ALIVE_S = 6.0  # a holder that is not heard of for so long may be replaced
LONGEST_WAIT_S = 2.0
OVERHEAD_BYTES = 96  # of an entry beside record and payload, about
AWAY = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError)
Answer = TypeVar("Answer")


class RedisJournal(Appends):
    """One opened journal. Example: `RedisJournal("redis://127.0.0.1:6379/0", run_id="r1")`

    Raises JournalLocked when another gateway has it open, ValueError when this Redis cannot keep it or another schema is there.
    """

    def __init__(self, url: str, *, run_id: str, max_pending_bytes: int = 64 << 20, patience_s: float = 30.0) -> None:
        """patience_s: how long opening and reading wait for Redis; appends wait for ever."""
        super().__init__(max_pending_bytes=max_pending_bytes)
        self._url, self._patience_s = url, patience_s
        base = f"headrace:{{{run_id}}}"
        self._stream, self._fence, self._alive, self._places = (f"{base}:{name}" for name in ("journal", "fence", "alive", "places"))
        self._client: Any = redis_client.connect(url)  # what it answers is typed differently from release to release
        self._closing = threading.Event()
        self._tip = Position(0, 0)  # the newest entry
        self._epoch = 0  # 0: not taken
        self._wait_for_aof = self._asked(lambda: redis_client.must_ask_for_sync(self._client, url))
        self._check_schema()
        self._me = holder.describe()
        self._take()
        self._guard = threading.Thread(target=self._stay_alive, name="journal alive", daemon=True)
        self._guard.start()

    @property
    def name(self) -> str:
        return f"{self._stream} in {self._url}"

    def is_empty(self) -> bool:
        return not self._asked(lambda: self._client.xlen(self._stream))

    def has(self, position: Position) -> bool:
        return bool(self._asked(lambda: self._client.xrange(self._stream, _id(position), _id(position))))

    def begin_after(self, position: Position) -> None:
        assert self.is_empty(), "only an empty journal may begin later"
        if self._epoch <= position.segment:
            self._epoch = self._take_from(self._me, position.segment + 1)
            assert self._epoch, "the holder changed while the journal was being opened"

    def read(self, after: Position | None = None) -> Iterator[Entry]:
        """See Appends. Raises JournalDamaged, naming the entry, for one whose checksum does not match or that is missing in between."""
        start, before = _id(after) if after else "0-0", after
        while page := self._page(start):
            for name, fields in page:
                entry = self._entry(name, fields)
                if before is not None and before.segment == entry.position.segment and entry.position.offset != before.offset + 1:
                    raise JournalDamaged(f"journal {self.name} goes from entry {_id(before)} to {_id(entry.position)}: what was between is gone; restore Redis from its append-only file or a replica")
                before = entry.position
                yield entry
            start = page[-1][0].decode()
        self._tip = before or Position(0, 0)
        self.num_bytes = self.bytes_since(None)
        self._make_group()

    def _page(self, after: str) -> list[Any]:
        return list(self._asked(lambda: self._client.xrange(self._stream, f"({after}", "+", count=PAGE)))

    def find(self, keys: Iterable[Key]) -> dict[Key, Position]:
        wanted = list(keys)
        names = [_place(key) for key in wanted]
        found = self._asked(lambda: self._client.hmget(self._places, names)) if names else []
        return {key: _position(name) for key, name in zip(wanted, found, strict=True) if name is not None}

    def payload(self, position: Position) -> bytes:
        return self._payloads([_id(position)])[0]

    def payloads(self, positions: Sequence[Position]) -> Iterator[bytes]:
        """See Appends; PAGE of them in one round trip."""
        names = [_id(position) for position in positions]
        for first in range(0, len(names), PAGE):
            yield from self._payloads(names[first : first + PAGE])

    def _payloads(self, names: list[str]) -> list[bytes]:
        def ask() -> list[Any]:
            with self._client.pipeline(transaction=False) as calls:
                for name in names:
                    calls.xrange(self._stream, name, name)
                return list(calls.execute())

        answers = self._asked(ask)
        for name, found in zip(names, answers, strict=True):
            if not found:
                raise JournalDamaged(f"journal {self.name} has no entry {name}; restart from the newest checkpoint")
        return [self._entry(*found[0]).payload for found in answers]

    def forget(self, before: Position) -> int:
        """Trims entries before a position, and moves the consumer group to what is left."""

        def trim() -> int:
            gone = int(self._client.xtrim(self._stream, minid=_id(before), approximate=False))
            if self._client.exists(self._stream):
                self._client.xgroup_setid(self._stream, GROUP, _id(Position(before.segment, max(0, before.offset - 1))))
            old = [place for place, name in self._client.hscan_iter(self._places, count=1000) if _position(name) < before]
            for first in range(0, len(old), 1000):
                self._client.hdel(self._places, *old[first : first + 1000])
            return gone

        return self._asked(trim)

    def bytes_since(self, position: Position | None) -> int:
        """From the journal's whole size by its number of entries: Redis does not tell sizes of ranges."""
        total = int(self._asked(lambda: self._client.memory_usage(self._stream, samples=64)) or 0)
        count = int(self._asked(lambda: self._client.xlen(self._stream)))
        if position is None or not count:
            return total
        first = self._asked(lambda: self._client.xrange(self._stream, count=1))
        covered = position.offset - _position(first[0][0]).offset if first and _position(first[0][0]).segment == position.segment else 0
        return int(total * max(0, count - max(0, covered)) / count)

    def _write(self, batch: list[Item]) -> list[Position]:
        first = self._tip.offset + 1 if self._tip.segment == self._epoch else 1
        positions = [Position(self._epoch, first + index) for index in range(len(batch))]
        arguments: list[Any] = [self._epoch, _id(self._tip)]
        for position, (body, payload, payload_crc, key) in zip(positions, batch, strict=True):
            arguments += [_id(position), body, payload, crc32_combine(crc32(body), payload_crc, len(payload)), _place(key) if key else ""]
        faultpoints.point("before_fsync")
        began_s = time.monotonic()
        self._until_back(lambda: self._append(arguments))
        self.sync_s += time.monotonic() - began_s
        faultpoints.point("after_fsync")
        self._tip = positions[-1]
        self.num_syncs += 1
        return positions

    def _append(self, arguments: list[Any]) -> None:
        """One script call, and its way to the disk where Redis can tell. Raises AWAY, or JournalFailed when this gateway was replaced."""
        with self._client.pipeline(transaction=False) as calls:
            calls.eval(redis_scripts.APPEND, 3, self._fence, self._stream, self._places, *arguments)
            if self._wait_for_aof:
                calls.execute_command("WAITAOF", 1, 0, 10_000)
            answers = calls.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, redis.ResponseError):
                raise self._refused(str(answer)) from answer
            if isinstance(answer, Exception):
                raise answer
        if self._wait_for_aof and answers[1][0] < 1:
            raise redis.TimeoutError("Redis did not sync its append-only file within 10 s")

    def _refused(self, words: str) -> JournalFailed:
        if words.startswith("FENCED"):
            return JournalFailed(f"journal {self.name} was taken over by another gateway (epoch {words.split()[-1]}, ours was {self._epoch}); this one must end")
        if words.startswith("LOST"):
            return JournalFailed(f"journal {self.name} lost entries that it had acknowledged: it ends at {words.split()[-1]}, the last one written was {_id(self._tip)}; set appendonly yes and appendfsync always, then restart")
        return JournalFailed(f"journal {self.name} refused an append: {words}; make room or repair Redis, then restart")

    def _until_back(self, call: Callable[[], Answer]) -> Answer:
        """The answer, asked for again while Redis is away. Raises JournalFailed once the journal is being closed."""
        wait_s, away_since = 0.05, 0.0
        while True:
            try:
                answer = call()
                if away_since:
                    _log.warning("journal %s: Redis is back after %.1f s", self.name, time.monotonic() - away_since)
                return answer
            except AWAY as error:
                if not away_since:
                    away_since = time.monotonic()
                    _log.error("journal %s: Redis is away (%s); appends wait", self.name, error)
                if self._closing.wait(wait_s):
                    raise JournalFailed(f"journal {self.name}: Redis is away ({error}), so what was not acknowledged is not kept") from error
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        """The answer of a read. Raises ValueError when Redis stays away for patience_s."""
        end, wait_s = time.monotonic() + self._patience_s, 0.05
        while True:
            try:
                return call()
            except AWAY as error:
                if time.monotonic() + wait_s > end:
                    raise ValueError(f"journal.url: no Redis answers at {self._url} ({error}); start it, or set journal.backend to segments") from error
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _check_schema(self) -> None:
        schema = self._asked(lambda: self._client.hget(self._fence, "schema"))
        if schema is None:
            self._asked(lambda: self._client.hset(self._fence, "schema", SCHEMA))
        elif int(schema) != SCHEMA:
            raise JournalDamaged(f"journal {self.name} has schema {int(schema)}, this program reads {SCHEMA}; use the version that wrote it")

    def _take(self) -> None:
        """Becomes the holder. One that is known to be dead is replaced at once, one on another machine once it was silent for ALIVE_S."""
        end = time.monotonic() + ALIVE_S + 1.0
        while True:
            seen = self._asked(lambda: self._client.get(self._alive))
            other = seen.decode() if seen else ""
            if not other or holder.is_dead(other):
                tip = self._asked(lambda: self._client.xrevrange(self._stream, count=1))
                least = _position(tip[0][0]).segment + 1 if tip else 1
                self._epoch = self._take_from(other, least)
                if self._epoch:
                    return
            elif holder.is_here(other) or time.monotonic() > end:
                raise JournalLocked(f"journal {self.name} is open in another gateway ({other}): one run has one gateway; stop that one, or use another run")
            time.sleep(0.1)

    def _take_from(self, other: str, least_epoch: int) -> int:
        """The new epoch, 0 when somebody else was faster. other: who held it, "" for nobody."""
        return int(self._asked(lambda: self._client.eval(redis_scripts.TAKE, 2, self._fence, self._alive, other, self._me, _ms(ALIVE_S), least_epoch)))

    def _stay_alive(self) -> None:
        """Thread: consumes the clock, produces renewals, waits a third of ALIVE_S, is unblocked by close."""
        while not self._closing.wait(ALIVE_S / 3):
            try:
                if not self._client.eval(redis_scripts.RENEW, 2, self._fence, self._alive, self._epoch, self._me, _ms(ALIVE_S)):
                    _log.error("journal %s: another gateway holds it; this one cannot write any more", self.name)
                    return
            except redis.RedisError as error:
                _log.warning("journal %s: could not say that this gateway lives: %s", self.name, error)

    def _make_group(self) -> None:
        try:
            self._client.xgroup_create(self._stream, GROUP, id="0-0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _entry(self, name: bytes, fields: dict[bytes, bytes]) -> Entry:
        position, body, payload = _position(name), fields.get(b"r", b""), fields.get(b"p", b"")
        if fields.get(b"c") != str(_crc(body, payload)).encode():
            raise JournalDamaged(f"journal {self.name} is damaged at entry {name.decode()}: the checksum of the entry does not match; restore Redis from its append-only file or a replica")
        record = msgpack.unpackb(body, strict_map_key=False)
        return Entry(position=position, record=record, payload=payload, num_bytes=len(body) + len(payload) + OVERHEAD_BYTES, durable_bytes=0)

    async def close(self) -> None:
        self._closing.set()
        await super().close()

    def _shut(self) -> None:
        try:
            if (self._client.get(self._alive) or b"").decode() == self._me:
                self._client.delete(self._alive)
        except redis.RedisError as error:
            _log.warning("journal %s: could not be released: %s", self.name, error)
        self._client.close()


def _id(position: Position) -> str:
    return f"{position.segment}-{position.offset}"


def _position(name: bytes) -> Position:
    epoch, number = name.split(b"-")
    return Position(int(epoch), int(number))


def _place(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _crc(body: bytes, payload: bytes) -> int:
    return crc32(payload, crc32(body))


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
