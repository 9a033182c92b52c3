"""The journal: durable when it says so, whole when it is read, and loud where it cannot be."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.gateway import journal as journal_module
from learner.gateway.journal import Journal, JournalFailed, JournalLocked
from learner.gateway.segments import HEAD_BYTES, HEADER, JournalDamaged, Position, segment_numbers, segment_path


def opened(folder: Path, **options: Any) -> Journal:
    journal = Journal(folder, **options)
    assert list(journal.read()) == []
    return journal


async def filled(folder: Path, num_records: int = 3, **options: Any) -> list[Position]:
    """Records {"n": i} with payloads of 10 bytes i, one sync each; closed."""
    journal = opened(folder, **options)
    positions = [await journal.append({"n": n}, bytes([n]) * 10) for n in range(num_records)]
    await journal.close()
    return positions


async def read(folder: Path) -> list[tuple[Any, bytes]]:
    journal = Journal(folder)
    try:
        return [(entry.record["n"], entry.payload) for entry in journal.read()]
    finally:
        await journal.close()


async def test_what_was_appended_is_read_back_in_order_with_payload_and_position(tmp_path: Path) -> None:
    positions = await filled(tmp_path)
    assert positions == sorted(positions)
    journal = Journal(tmp_path)
    entries = list(journal.read())
    assert [(entry.record, entry.payload) for entry in entries] == [({"n": n}, bytes([n]) * 10) for n in range(3)]
    assert [entry.position for entry in entries] == positions
    assert journal.payload(positions[1]) == b"\x01" * 10
    later = await journal.append({"n": 3})
    assert later > positions[-1] and journal.payload(later) == b""
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == [0, 1, 2, 3]


async def test_order_is_the_order_of_calls_and_many_waiters_share_a_sync(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    await asyncio.gather(*(journal.append({"n": n}) for n in range(500)))
    assert journal.num_syncs <= 3
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == list(range(500))


async def test_an_append_is_answered_only_after_its_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def slow(file: int) -> None:
        real(file)
        synced.append(os.fstat(file).st_size)

    journal = opened(tmp_path)
    monkeypatch.setattr(os, "fdatasync", slow)
    position = await journal.append({"n": 1}, b"x" * 100)
    assert synced and synced[-1] >= position.offset + HEAD_BYTES + 100
    await journal.close()


async def test_a_waiter_that_gives_up_does_not_stop_the_others(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    gone, kept = journal.append({"n": 0}), journal.append({"n": 1})
    gone.cancel()
    await kept
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == [0, 1]


@pytest.mark.parametrize("num_bytes", [1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 5])
async def test_a_torn_tail_is_cut_off_and_reported_and_the_journal_goes_on(tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    last = (await filled(tmp_path))[-1]
    path = segment_path(tmp_path, 0)
    os.truncate(path, last.offset + num_bytes)
    with caplog.at_level(logging.WARNING):
        journal = Journal(tmp_path)
        assert [entry.record["n"] for entry in journal.read()] == [0, 1]
    assert str(path) in caplog.text and f"cut off {num_bytes} bytes at byte {last.offset}" in caplog.text
    assert path.stat().st_size == last.offset
    await journal.append({"n": 9})
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == [0, 1, 9]


async def test_a_torn_batch_whose_later_part_reached_the_disk_is_a_torn_tail(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    await journal.append({"n": 0})
    torn, _whole = await asyncio.gather(journal.append({"n": 1}, b"a" * 50), journal.append({"n": 2}, b"b" * 50))
    await journal.close()
    scratch(segment_path(tmp_path, 0), torn.offset + HEAD_BYTES + 20)
    assert await read(tmp_path) == [(0, b"")]  # both came in one sync that never ended: neither was acknowledged


async def test_damage_to_what_was_durable_names_file_and_offset(tmp_path: Path) -> None:
    positions = await filled(tmp_path)
    scratch(segment_path(tmp_path, 0), positions[1].offset + HEAD_BYTES + 3)
    with pytest.raises(JournalDamaged, match=rf"000000000000\.log is damaged at byte {positions[1].offset}: the checksum"):
        await read(tmp_path)


async def test_damage_at_the_end_of_an_older_segment_is_no_torn_tail(tmp_path: Path) -> None:
    positions = await filled(tmp_path, segment_bytes=20)
    assert segment_numbers(tmp_path) == [0, 1, 2]
    scratch(segment_path(tmp_path, 1), positions[1].offset + HEAD_BYTES)
    with pytest.raises(JournalDamaged, match=r"000000000001\.log"):
        await read(tmp_path)


async def test_a_missing_segment_is_noticed(tmp_path: Path) -> None:
    await filled(tmp_path, segment_bytes=20)
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(JournalDamaged, match="some in between are missing"):
        await read(tmp_path)


async def test_a_segment_whose_header_was_torn_is_begun_again(tmp_path: Path) -> None:
    await filled(tmp_path)
    segment_path(tmp_path, 1).write_bytes(HEADER[:5])
    journal = Journal(tmp_path)
    assert len(list(journal.read())) == 3
    assert (await journal.append({"n": 3})) == Position(1, len(HEADER))
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("start", "words"), [(b"HEADRACE\x07\x00\x00\x00", "schema 7, this program reads 1"), (b"PK\x03\x04" * 5, "does not begin as")])
async def test_another_schema_or_another_kind_of_file_is_refused(tmp_path: Path, start: bytes, words: str) -> None:
    segment_path(tmp_path, 0).write_bytes(start)
    with pytest.raises(JournalDamaged, match=words):
        await read(tmp_path)


async def test_a_second_opener_is_refused_also_in_another_process(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(JournalLocked, match=rf"is open in another process \(pid {os.getpid()}\): one run folder has one gateway"):
        Journal(tmp_path)
    code = f"from pathlib import Path; from learner.gateway.journal import Journal; Journal(Path({str(tmp_path)!r}))"
    other = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert "JournalLocked" in other.stderr
    await journal.close()
    assert await read(tmp_path) == []


async def test_segments_roll_over_and_only_wholly_covered_ones_are_forgotten(tmp_path: Path) -> None:
    journal = opened(tmp_path, segment_bytes=80)
    positions = [await journal.append({"n": n}, b"x" * 60) for n in range(6)]
    assert [position.segment for position in positions] == [0, 1, 2, 3, 4, 5]
    assert journal.forget(positions[0]) == 0
    assert journal.forget(positions[3]) == 3
    assert segment_numbers(tmp_path) == [3, 4, 5]
    assert journal.forget(Position(99, 0)) == 2  # never the one that is written to
    await journal.append({"n": 6})
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == [5, 6]


async def test_a_broken_disk_is_an_error_to_every_waiter_and_the_log_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    await journal.append({"n": 0})
    real = os.writev

    def half_then_broken(file: int, buffers: list[bytes]) -> int:
        real(file, [b"".join(buffers)[:30]])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "writev", half_then_broken)
    results = await asyncio.gather(journal.append({"n": 1}), journal.append({"n": 2}), return_exceptions=True)
    assert [type(result) for result in results] == [JournalFailed, JournalFailed]
    assert "Input/output error; make room" in str(results[0])
    monkeypatch.setattr(os, "writev", real)
    with pytest.raises(JournalFailed):  # what followed a lost record could not be replayed, so nothing more is taken
        await journal.append({"n": 3})
    await journal.close()
    assert await read(tmp_path) == [(0, b"")]


def half_then_full(file: int, buffers: list[bytes]) -> int:
    """As a disk whose last bytes are taken."""
    os.write(file, b"".join(buffers)[:7])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("segment_bytes", [1 << 20, 40], ids=["in a segment", "at the beginning of one"])
async def test_a_full_disk_is_waited_for_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int) -> None:
    journal = opened(tmp_path, segment_bytes=segment_bytes)
    monkeypatch.setattr("learner.gateway.journal.ROOM_S", 0.01)
    await journal.append({"n": 0}, b"x" * 40)
    real = os.writev
    monkeypatch.setattr(os, "writev", half_then_full)
    waiting = [journal.append({"n": 1}), journal.append({"n": 2})]
    await asyncio.sleep(0.1)
    assert not any(future.done() for future in waiting)
    monkeypatch.setattr(os, "writev", real)
    await asyncio.gather(*waiting)
    await journal.append({"n": 3})
    await journal.close()
    assert [n for n, _ in await read(tmp_path)] == [0, 1, 2, 3]


async def test_an_error_that_nobody_thought_of_ends_the_journal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next batch would be written after one that is lost."""
    journal = opened(tmp_path)

    def surprise(file: int) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(os, "fdatasync", surprise)
    with pytest.raises(JournalFailed, match="could not be written: RuntimeError: surprise"):
        await journal.append({"n": 0})
    monkeypatch.undo()
    with pytest.raises(JournalFailed):
        await journal.append({"n": 1})
    await journal.close()


async def test_a_journal_that_waits_for_room_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    monkeypatch.setattr(os, "writev", half_then_full)
    waiting = journal.append({"n": 0})
    await asyncio.sleep(0.05)
    await journal.close()
    with pytest.raises(JournalFailed, match="No space left on device; make room"):
        await waiting


async def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    monkeypatch.setattr(os, "writev", lambda file, buffers: os.write(file, b"".join(buffers)[:7]))
    await asyncio.gather(journal.append({"n": 0}, b"abc"), journal.append({"n": 1}, b"def"))
    await journal.close()
    assert await read(tmp_path) == [(0, b"abc"), (1, b"def")]


async def test_callers_wait_while_too_many_bytes_are_behind(tmp_path: Path) -> None:
    journal = opened(tmp_path, max_pending_bytes=1000)
    await asyncio.wait_for(journal.drained(), 20)
    pending = journal.append({"n": 0}, b"x" * 2000)
    waiting = asyncio.create_task(journal.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    await pending
    await asyncio.wait_for(waiting, 20)
    await journal.close()


async def test_a_new_segment_is_durable_by_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(journal_module, "_sync_folder", synced.append)
    journal = opened(tmp_path, segment_bytes=20)
    await journal.append({"n": 0})
    await journal.append({"n": 1})
    assert synced == [tmp_path, tmp_path]
    await journal.close()


def scratch(path: Path, offset: int) -> None:
    """Turns over one byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


async def test_whatever_kept_an_entry_from_the_disk_is_told_to_those_who_wait_and_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    monkeypatch.setattr(journal_module, "head", lambda *_: (_ for _ in ()).throw(MemoryError("no memory for the head")))
    with pytest.raises(JournalFailed, match="MemoryError: no memory for the head"):
        await asyncio.wait_for(journal.append({"n": 0}), 20)
    with pytest.raises(JournalFailed):
        await journal.append({"n": 1})
    await journal.close()
