"""What killed runs leave in shared memory is cleared by their next start, and named by that of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner import holder, shared_memory
from learner.shared_memory import claim, left_behind, release, snapshot_root


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "PARENT", tmp_path)
    return tmp_path


def killed(run_id: str, run_dir: str) -> Path:
    """The folder of a run whose process is gone, with a snapshot of 5000 bytes."""
    ran = subprocess.run([sys.executable, "-c", "from learner import holder; print(holder.describe())"], capture_output=True, text=True, timeout=50, check=True)
    root = snapshot_root(run_id)
    (root / "17-3").mkdir(parents=True)
    (root / "17-3" / "rank-0.bin").write_bytes(b"x" * 5000)
    (root / "owner-1").write_text(f"{ran.stdout.strip()}\n{run_dir}\n")
    return root


def test_what_a_dead_run_left_is_named_with_its_size_and_run_folder(memory: Path) -> None:
    root = killed("r1", "/data/first")
    claim(snapshot_root("r2"), Path("/data/second"), clear=True)  # a live one is not named
    (memory / "headrace-unknown").mkdir()  # nor one that nobody claimed
    (found,) = left_behind()
    assert (found.folder, found.run_dir) == (root, "/data/first")
    assert found.num_bytes == 5000 + (root / "owner-1").stat().st_size


def test_the_next_start_of_the_run_clears_it_and_its_end_removes_it() -> None:
    root = killed("r1", "/data/first")
    claim(root, Path("/data/first"), clear=True)
    assert [path.name for path in root.iterdir()] == [f"owner-{os.getpid()}"] and not left_behind()
    release(root)
    assert not root.exists()


def test_the_folder_stays_while_another_process_of_the_run_uses_it() -> None:
    root = snapshot_root("r1")
    claim(root, Path("/data/first"), clear=True)
    (root / "owner-1").write_text(f"{holder.describe()}\n/data/first\n")
    release(root)
    assert [path.name for path in root.iterdir()] == ["owner-1"]


def test_ranks_add_themselves_and_take_nothing_away() -> None:
    root = killed("r1", "/data/first")
    claim(root, Path("/data/first"), clear=False)
    assert (root / "17-3" / "rank-0.bin").exists() and not left_behind()


def test_a_copied_run_folder_does_not_take_the_memory_of_the_run_it_was_copied_from() -> None:
    root = snapshot_root("r1")
    root.mkdir()
    (root / "owner-1").write_text(f"{holder.describe()}\n/data/first\n")
    with pytest.raises(ValueError, match=r"run id r1 is in use on this machine by the run in /data/first .*delete the file run_id in /data/copy"):
        claim(root, Path("/data/copy"), clear=True)
    assert (root / "owner-1").exists()
