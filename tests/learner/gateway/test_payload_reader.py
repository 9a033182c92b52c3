"""Payloads come back in the order asked for, neighbours with one read, each checked."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from learner.gateway import segments
from learner.gateway.segments import HEAD_BYTES, PayloadReader, head, runs

BODY = b"record"


def written(path: Path, sizes: list[int]) -> list[int]:
    """A file of entries with payloads of these sizes, entry n of letter n; their offsets."""
    data, offsets = b"", []
    for number, size in enumerate(sizes):
        payload = bytes([97 + number]) * size
        offsets.append(len(data))
        data += head(BODY, payload, 0) + BODY + payload
    path.write_bytes(data)
    return offsets


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 2]])
def test_payloads_come_in_the_order_asked_for(tmp_path: Path, order: list[int]) -> None:
    sizes = [10, 70_000, 0, 200_000]
    offsets = written(tmp_path / "f", sizes)
    with (tmp_path / "f").open("rb") as file:
        reader = PayloadReader(file.fileno(), [offsets[n] for n in order], (tmp_path / "f").stat().st_size)
        assert [reader.payload(offsets[n]) for n in order] == [bytes([97 + n]) * sizes[n] for n in order]


def test_neighbours_come_with_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = written(tmp_path / "f", [1000] * 20)
    reads: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        reads.append(offset)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    with (tmp_path / "f").open("rb") as file:
        reader = PayloadReader(file.fileno(), offsets, (tmp_path / "f").stat().st_size)
        assert all(len(reader.payload(offset)) == 1000 for offset in offsets)
    assert reads == [0]


def test_a_run_ends_where_offsets_fall_or_lie_far_apart() -> None:
    far = segments.GAP_BYTES
    # 0 and 500 are neighbours; 90 falls back; 90 + far is just near enough, one byte more is not.
    assert runs([0, 500, 90, 90 + far, 91 + 2 * far]) == {0: 500, 90: far, 91 + 2 * far: 0}
    steps = [n * far for n in range(10)]  # 8 gaps fill a run
    assert 8 * far == segments.RUN_BYTES and runs(steps) == {0: 8 * far, 9 * far: 0}


@pytest.mark.parametrize(("at", "words"), [(0, "no entry begins there"), (HEAD_BYTES - 1, "checksum"), (HEAD_BYTES + 2, "checksum"), (-1, "checksum")])
def test_a_changed_byte_is_found(tmp_path: Path, at: int, words: str) -> None:
    (offset,) = written(tmp_path / "f", [500])
    data = bytearray((tmp_path / "f").read_bytes())
    data[at] ^= 1
    (tmp_path / "f").write_bytes(data)
    with (tmp_path / "f").open("rb") as file:
        found = PayloadReader(file.fileno(), [offset], len(data)).payload(offset)
    assert isinstance(found, str) and words in found


@pytest.mark.parametrize("left", [5, HEAD_BYTES, HEAD_BYTES + 300])
def test_an_entry_that_is_not_whole_is_found(tmp_path: Path, left: int) -> None:
    written(tmp_path / "f", [500])
    os.truncate(tmp_path / "f", left)
    with (tmp_path / "f").open("rb") as file:
        assert isinstance(PayloadReader(file.fileno(), [0], left).payload(0), str)


def test_a_head_made_from_the_payloads_own_checksum_is_the_same() -> None:
    payload = bytes(range(256)) * 10
    assert head(BODY, payload, 7, zlib.crc32(payload)) == head(BODY, payload, 7)
    # marker, lengths, durable count; then zlib's CRC-32 of lengths, count, body, payload
    fields = len(BODY).to_bytes(4, "little") + len(payload).to_bytes(4, "little") + (7).to_bytes(4, "little")
    assert head(BODY, payload, 7) == b"\xabHRE" + fields + zlib.crc32(fields + BODY + payload).to_bytes(4, "little")
