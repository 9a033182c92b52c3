"""Lines survive a disk that refuses, and a crash inside one."""

from __future__ import annotations

from pathlib import Path

from learner.trainer.lines import Lines


def test_what_the_disk_refuses_is_written_before_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()  # nothing can be written to it
    lines = Lines(path)
    lines.append("1\n")
    lines.append("2\n")
    assert lines.num_late_bytes == 4
    path.rmdir()
    lines.append("3\n")
    assert (path.read_text(), lines.num_late_bytes) == ("1\n2\n3\n", 0)


def test_the_piece_of_a_line_that_a_crash_left_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    lines = Lines(path)
    lines.append('{"step": 2}\n')
    lines.append('{"step": 3}\n')
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
