"""Lines survive a disk that refuses, and a crash inside one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.lines import Lines


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


def test_a_disk_that_takes_half_a_line_keeps_none_of_it_so_that_another_writer_begins_on_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    trainer, gateway = Lines(path), Lines(path)
    gateway.append('{"step": 1}\n')
    real, calls = os.write, []

    def half(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:5])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        trainer.append('{"step": 2}\n')
    gateway.append('{"step": 3}\n')
    trainer.append('{"step": 4}\n')
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 3}', '{"step": 2}', '{"step": 4}']


def test_a_long_unfinished_line_is_cut_off_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n" + "x" * 200_000)  # more than one look back
    Lines(path).append("2\n")
    assert path.read_text() == "1\n2\n"


def test_lines_of_two_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = "import sys\nfrom pathlib import Path\nfrom learner.lines import Lines\nlines = Lines(Path(sys.argv[1]))\nfor _ in range(200):\n    lines.append(sys.argv[2] * 5000 + '\\n')"
    children = [subprocess.Popen([sys.executable, "-c", program, str(path), letter]) for letter in "ab"]
    assert [child.wait(30) for child in children] == [0, 0]
    assert sorted(path.read_text().split()) == ["a" * 5000] * 200 + ["b" * 5000] * 200
