"""Both journals keep one contract: these tests run over the segmented log and over Redis Streams."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from learner.config import JournalConfig
from learner.gateway import redis_journal
from learner.gateway.appends import Appends, JournalFailed, JournalLocked
from learner.gateway.books import Books
from learner.gateway.journals import open_journal
from learner.gateway.ledger import Ledger
from learner.gateway.segments import JournalDamaged, Position, segment_numbers, segment_path
from tests.redis_server import RedisServer

Open = Callable[[], Appends]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def client(server: RedisServer) -> Any:
    return redis.Redis.from_url(server.url)


@pytest.fixture(params=["segments", "redis"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> Open:
    config = JournalConfig(backend=request.param, url=server.url, segment_bytes=4096)
    return lambda: open_journal(config, tmp_path / "journal", f"run-{tmp_path.name}")


def sample(seq: int, index: int, **more: Any) -> dict[str, Any]:
    return {"type": "submitted", "seq": seq, "sample_index": index, **more}


async def filled(opener: Open, num_groups: int = 3) -> list[Position]:
    """Samples 0 and 1 of each group, payload of 1000 bytes `seq`; closed."""
    journal = opener()
    assert list(journal.read()) == []
    positions = [await journal.append(sample(seq, index), bytes([seq]) * 1000) for seq in range(num_groups) for index in (0, 1)]
    await journal.close()
    return positions


async def test_entries_come_back_in_order_with_their_payloads_and_positions(opener: Open) -> None:
    positions = await filled(opener)
    assert positions == sorted(positions)
    journal = opener()
    entries = list(journal.read())
    assert [(e.record["seq"], e.record["sample_index"], e.payload) for e in entries] == [(s, i, bytes([s]) * 1000) for s in range(3) for i in (0, 1)]
    assert [e.position for e in entries] == positions
    assert journal.payload(positions[3]) == b"\x01" * 1000
    later = await journal.append({"type": "covered", "step": 1})
    assert later > positions[-1]
    await journal.close()


async def test_payloads_are_read_in_the_order_asked_for_in_chunks_of_about_so_many_bytes(opener: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_journal, "PAGE", 4)  # a page that ends inside a chunk; segments of 4096 bytes hold four payloads
    journal = opener()
    assert list(journal.read()) == []
    books = Books(cast(Ledger, None), journal)
    for seq in range(10):
        await books.commit_samples([((f"g{seq:08d}", 0), sample(seq, 0), bytes([seq]) * 1000)])
    order = [9, 0, 5, 4, 8, 1, 2]
    chunks = await asyncio.to_thread(lambda: list(books.read([(f"g{seq:08d}", 0) for seq in order], 2500)))
    assert [[payload[0] for payload in chunk] for chunk in chunks] == [[9, 0, 5], [4, 8, 1], [2]]
    assert all(payload == bytes([payload[0]]) * 1000 for chunk in chunks for payload in chunk)
    await journal.close()


async def test_reading_begins_after_a_position_and_the_rest_is_found_by_identity(opener: Open) -> None:
    positions = await filled(opener)
    journal = opener()
    assert journal.has(positions[3]) and not journal.is_empty()
    assert [e.position for e in journal.read(after=positions[3])] == positions[4:]
    wanted = [("g00000000", 1), ("g00000002", 0), ("g00000009", 0)]
    assert journal.find(wanted) == {wanted[0]: positions[1], wanted[1]: positions[4]}
    await journal.close()


async def test_many_waiters_share_a_write_and_order_is_the_order_of_calls(opener: Open) -> None:
    journal = opener()
    list(journal.read())
    await asyncio.gather(*(journal.append({"type": "x", "n": n}) for n in range(400)))
    assert journal.num_syncs <= 3  # type: ignore[attr-defined]
    await journal.close()
    journal = opener()
    assert [e.record["n"] for e in journal.read()] == list(range(400))
    await journal.close()


async def test_a_second_opener_is_refused_while_the_first_lives_and_not_after_it_was_killed(opener: Open, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    await filled(opener)
    journal = opener()
    with pytest.raises(JournalLocked, match=r"open in another.*one run"):
        opener()
    list(journal.read())
    await journal.append({"type": "x"})
    await journal.close()
    # Another process opens it and is killed: its hold is over at once.
    server: RedisServer = request.getfixturevalue("server")
    backend = request.node.callspec.params["opener"]
    code = (
        "import time; from pathlib import Path; from learner.config import JournalConfig; from learner.gateway.journals import open_journal\n"
        f"j = open_journal(JournalConfig(backend={backend!r}, url={server.url!r}), Path({str(tmp_path / 'journal')!r}), {f'run-{tmp_path.name}'!r})\n"
        "print('open', flush=True); time.sleep(60)"
    )
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert other.stdout is not None and await other.stdout.readline() == b"open\n"
    with pytest.raises(JournalLocked):
        opener()
    other.kill()
    await other.wait()
    started = time.monotonic()
    journal = opener()
    assert time.monotonic() - started < 20  # the other one would have slept for a minute
    assert len(list(journal.read())) == 7
    await journal.close()


async def test_forgetting_leaves_what_comes_after(opener: Open) -> None:
    positions = await filled(opener, num_groups=6)  # segments of 4096 bytes take four of these entries
    journal = opener()
    list(journal.read())
    before = journal.bytes_since(None)
    journal.forget(positions[8])
    assert journal.bytes_since(None) < before
    assert journal.payload(positions[8]) == b"\x04" * 1000
    assert journal.find([("g00000000", 0), ("g00000004", 0)]) == {("g00000004", 0): positions[8]}
    await journal.close()
    journal = opener()
    assert [e.position for e in journal.read()] == positions[8:]
    assert (await journal.append({"type": "x"})) > positions[-1]
    await journal.close()


async def test_an_emptied_journal_begins_after_the_positions_of_the_one_before(opener: Open) -> None:
    gone = Position(7, 99)
    journal = opener()
    assert journal.is_empty()
    journal.begin_after(gone)
    assert list(journal.read()) == []
    first = await journal.append({"type": "continued"})
    assert first > gone
    await journal.close()
    journal = opener()
    assert [e.position for e in journal.read()] == [first]
    await journal.close()


async def test_another_schema_is_refused(opener: Open, request: pytest.FixtureRequest, tmp_path: Path, client: Any) -> None:
    await filled(opener)
    if request.node.callspec.params["opener"] == "segments":
        path = segment_path(tmp_path / "journal", 0)
        path.write_bytes(path.read_bytes()[:8] + b"\x07" + path.read_bytes()[9:])
    else:
        client.hset(f"headrace:{{run-{tmp_path.name}}}:fence", "schema", 7)
    with pytest.raises(JournalDamaged, match="schema 7, this program reads 1"):
        list(opener().read())


async def test_bit_rot_is_found_and_named(opener: Open, request: pytest.FixtureRequest, tmp_path: Path, client: Any) -> None:
    positions = await filled(opener)
    if request.node.callspec.params["opener"] == "segments":
        path = segment_path(tmp_path / "journal", 0)
        data = bytearray(path.read_bytes())
        data[positions[1].offset + 500] ^= 1
        path.write_bytes(data)
        words = rf"damaged at byte {positions[1].offset}"
    else:
        stream = f"headrace:{{run-{tmp_path.name}}}:journal"
        entries = client.xrange(stream)
        client.delete(stream)
        for number, (name, fields) in enumerate(entries):
            client.xadd(stream, {**fields, b"p": b"rotten"} if number == 1 else fields, id=name)
        words = rf"damaged at entry {positions[1].segment}-{positions[1].offset}"
    journal = opener()
    with pytest.raises(JournalDamaged, match=words):
        list(journal.read())
    with pytest.raises(JournalDamaged):
        journal.payload(positions[1])
    await journal.close()


async def test_callers_wait_while_too_many_bytes_are_behind(opener: Open) -> None:
    journal = opener()
    list(journal.read())
    pending = journal.append({"type": "x"}, b"x" * (65 << 20))
    waiting = asyncio.create_task(journal.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    await pending
    await asyncio.wait_for(waiting, 20)
    await journal.close()


# The index of the segmented log


def index_of(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / "journal" / "index.sqlite")


@pytest.fixture
def segments(tmp_path: Path) -> Open:
    return lambda: open_journal(JournalConfig(segment_bytes=4096), tmp_path / "journal", "r1")


@pytest.mark.parametrize("harm", ["missing", "behind", "broken", "foreign"])
async def test_an_index_that_is_missing_behind_broken_or_anothers_is_made_again_from_the_log(segments: Open, tmp_path: Path, harm: str) -> None:
    positions = await filled(segments)
    path = tmp_path / "journal" / "index.sqlite"
    if harm == "missing":
        path.unlink()
    elif harm == "broken":
        path.write_bytes(b"no database" * 1000)
    else:
        with index_of(tmp_path) as database:
            database.execute("DELETE FROM payloads")
            there = positions[1] if harm == "behind" else Position(0, 77)
            database.execute("UPDATE reached SET segment = ?, offset = ?", (there.segment, there.offset))
            if harm == "behind":
                database.executemany("INSERT INTO payloads VALUES ('g00000000', ?, ?, ?)", [(i, positions[i].segment, positions[i].offset) for i in (0, 1)])
            else:
                database.execute("INSERT INTO payloads VALUES ('g00000002', 1, 0, 77)")
        database.close()
    journal = segments()
    assert [e.position for e in journal.read(after=positions[4])] == positions[5:]
    keys = [(f"g{seq:08d}", index) for seq in range(3) for index in (0, 1)]
    assert journal.find(keys) == dict(zip(keys, positions, strict=True))
    await journal.close()


async def test_an_index_that_cannot_be_written_costs_no_record(segments: Open, tmp_path: Path) -> None:
    journal = segments()
    list(journal.read())
    with index_of(tmp_path) as database:
        database.execute("DROP TABLE payloads")
    database.close()
    position = await journal.append(sample(0, 0), b"p")
    assert journal.find([("g00000000", 0)]) == {("g00000000", 0): position}  # read from the log
    await journal.append(sample(0, 1), b"q")
    await journal.close()
    journal = segments()
    assert len(list(journal.read())) == 2
    await journal.close()


# Redis alone


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that a test may kill."""
    with RedisServer(tmp_path / "redis") as started:
        yield started


async def test_appends_wait_while_redis_is_away_and_nothing_is_lost_or_doubled(own: RedisServer) -> None:
    journal = redis_journal.RedisJournal(own.url, run_id="r1")
    list(journal.read())
    first = await journal.append({"type": "x", "n": 0})
    own.kill()
    waiting = [journal.append({"type": "x", "n": n}) for n in (1, 2)]
    await asyncio.sleep(0.5)
    assert not any(future.done() for future in waiting)
    own.start()
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    # The answer to this one is lost: it is sent again under its own id.
    real = journal._append
    lost: list[int] = []

    def answer_lost(arguments: list[Any]) -> None:
        real(arguments)
        if not lost:
            lost.append(1)
            raise redis.ConnectionError("the answer was lost")

    journal._append = answer_lost  # type: ignore[method-assign]
    last = await asyncio.wait_for(journal.append({"type": "x", "n": 3}), 60)
    assert last.offset == first.offset + 3 and lost
    await journal.close()
    journal = redis_journal.RedisJournal(own.url, run_id="r1")
    assert [e.record["n"] for e in journal.read()] == [0, 1, 2, 3]
    await journal.close()


async def test_a_gateway_that_was_replaced_cannot_write(own: RedisServer) -> None:
    stale = redis_journal.RedisJournal(own.url, run_id="r1")
    list(stale.read())
    await stale.append({"type": "x", "n": 0})
    client: Any = redis.Redis.from_url(own.url)
    client.set("headrace:{r1}:alive", "far-away boot 1 1 token", px=200)  # as if on another machine, and silent since
    new = await asyncio.to_thread(redis_journal.RedisJournal, own.url, run_id="r1")
    assert [e.record["n"] for e in new.read()] == [0]
    with pytest.raises(JournalFailed, match=r"taken over by another gateway \(epoch 2, ours was 1\)"):
        await stale.append({"type": "x", "n": 1})
    await new.append({"type": "x", "n": 2})
    await stale.close()
    with pytest.raises(JournalLocked):
        redis_journal.RedisJournal(own.url, run_id="r1")
    await new.close()


async def test_a_redis_that_comes_back_without_what_it_acknowledged_is_not_written_to(own: RedisServer) -> None:
    journal = redis_journal.RedisJournal(own.url, run_id="r1")
    list(journal.read())
    await journal.append({"type": "x", "n": 0})
    client: Any = redis.Redis.from_url(own.url)
    client.delete("headrace:{r1}:journal")
    with pytest.raises(JournalFailed, match="lost entries that it had acknowledged"):
        await journal.append({"type": "x", "n": 1})
    await journal.close()


async def test_an_entry_that_is_gone_from_the_middle_is_noticed(own: RedisServer) -> None:
    journal = redis_journal.RedisJournal(own.url, run_id="r1")
    list(journal.read())
    positions = [await journal.append({"type": "x", "n": n}) for n in range(3)]
    await journal.close()
    client: Any = redis.Redis.from_url(own.url)
    client.xdel("headrace:{r1}:journal", f"{positions[1].segment}-{positions[1].offset}")
    journal = redis_journal.RedisJournal(own.url, run_id="r1")
    with pytest.raises(JournalDamaged, match="what was between is gone"):
        list(journal.read())
    await journal.close()


async def test_what_no_cut_covers_is_the_lag_of_the_consumer_group(own: RedisServer) -> None:
    journal = redis_journal.RedisJournal(own.url, run_id="r1")
    list(journal.read())
    positions = [await journal.append({"type": "x", "n": n}) for n in range(5)]
    journal.forget(positions[3])
    client: Any = redis.Redis.from_url(own.url)
    assert client.xlen("headrace:{r1}:journal") == 2
    group = client.xinfo_groups("headrace:{r1}:journal")[0]
    assert (group["name"], group["last-delivered-id"]) == (b"cuts", b"1-3")
    assert len(client.xreadgroup("cuts", "anyone", {"headrace:{r1}:journal": ">"})[0][1]) == 2
    await journal.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"appendonly": "no"}, "appendonly no, so a restart would lose"),
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru"),
        ({"appendfsync": "everysec"}, "appendfsync everysec"),
    ],
)
def test_a_redis_that_would_lose_samples_is_refused_with_the_setting(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    fsync = settings.pop("appendfsync", "always")
    with RedisServer(tmp_path / "redis", appendfsync=fsync, **settings) as lax:
        version = str(redis.Redis.from_url(lax.url).info("server")["redis_version"])  # type: ignore[index]
        if fsync == "everysec" and tuple(map(int, version.split(".")[:2])) >= (7, 2):
            redis_journal.RedisJournal(lax.url, run_id="r1")  # it waits for the sync of each batch instead
            return
        with pytest.raises(ValueError, match=words):
            redis_journal.RedisJournal(lax.url, run_id="r1")


@pytest.mark.parametrize(("url", "words"), [("127.0.0.1:1", "no address of a Redis"), ("redis://127.0.0.1:1/0", "no Redis answers at")])
def test_a_wrong_address_is_the_users_mistake(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        redis_journal.RedisJournal(url, run_id="r1", patience_s=0.2)


def test_the_segments_fixture_makes_several(tmp_path: Path, segments: Open) -> None:
    asyncio.run(filled(segments, num_groups=6))
    assert len(segment_numbers(tmp_path / "journal")) == 3
