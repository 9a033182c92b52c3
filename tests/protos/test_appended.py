"""Whole lines of files that are being written."""

from __future__ import annotations

from pathlib import Path

from protos.appended import whole_lines


def test_lines_end_with_a_line_feed_and_what_is_not_whole_is_left(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert whole_lines(file, 0) == []
    file.write_bytes(b"one\n 0%\r100%\nthr")
    assert whole_lines(file, 0) == [(b"one\n", 4), (b" 0%\r100%\n", 13)]
    file.write_bytes(b"one\n 0%\r100%\nthree\n")
    assert whole_lines(file, 13) == [(b"three\n", 19)]
