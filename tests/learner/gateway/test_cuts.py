"""A folder is a cut when its marker says so, and the marker comes last."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.gateway import cuts


def save(folder: Path, step: int) -> cuts.Cut:
    """A finished save, made a cut."""
    source = folder / f"step-{step:06d}.tmp"
    source.mkdir(parents=True)
    (source / "model").write_bytes(b"m")
    cut = cuts.Cut(folder=cuts.folder_of(folder, step), run_id="r1", policy_step=step, lineage=2, segment=1, offset=step)
    cuts.write(source, cut, {"account": {"step": step}}, [("g00000000", 0)], lambda key: b"payload of %d" % step)
    return cut


def test_a_save_becomes_a_cut_under_its_name(tmp_path: Path) -> None:
    cut = save(tmp_path, 7)
    assert cuts.newest(tmp_path) == cut and cut.folder.name == "step-000007"
    assert sorted(path.name for path in cut.folder.iterdir()) == ["cut.json", "ledger.msgpack", "model", "payloads.bin"]
    assert cuts.read_account(cut) == {"schema": 1, "account": {"step": 7}}


def test_the_newest_cut_is_that_of_the_highest_step_and_unmarked_folders_are_none(tmp_path: Path) -> None:
    newest = save(tmp_path, 10)
    save(tmp_path, 9)
    (tmp_path / "step-000011").mkdir()
    (tmp_path / "step-000012.tmp").mkdir()
    (tmp_path / "step-000012.tmp" / "cut.json").write_text("{}")
    assert cuts.newest(tmp_path) == newest


def test_without_a_folder_there_is_no_cut(tmp_path: Path) -> None:
    assert cuts.newest(tmp_path / "none") is None


def test_a_failed_write_leaves_no_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_FAULT", "before_cut_marker=full")
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, 1)
    assert cuts.newest(tmp_path) is None


def test_retention_keeps_the_newest_and_what_is_still_being_written(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for name in ("step-000002.tmp", "step-000004.tmp", "notes"):
        (tmp_path / name).mkdir()
    assert cuts.retain(tmp_path, 2).policy_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-000002", "step-000003", "step-000004.tmp"]


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 9}', "[]"])
def test_an_unreadable_marker_is_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    cut = save(tmp_path, 1)
    (cut.folder / "cut.json").write_text(text)
    with pytest.raises(ValueError, match=r"cut\.json is no readable marker.*delete .*step-000001"):
        cuts.newest(tmp_path)


def test_an_unreadable_account_is_named_with_the_way_out(tmp_path: Path) -> None:
    cut = save(tmp_path, 1)
    (cut.folder / "ledger.msgpack").write_bytes(b"\xc1")
    with pytest.raises(ValueError, match=r"ledger\.msgpack cannot be read.*delete"):
        cuts.read_account(cut)
