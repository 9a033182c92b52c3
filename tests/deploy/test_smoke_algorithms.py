"""The smoke run with each preset: a run file that loads, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.demo import smoke
from deploy.mistakes import Mistakes
from deploy.schema import parse
from learner.presets import PRESETS

NEEDS_MORE = {"opd": "teacher"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_a_run_file_or_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "stop_ids", lambda model: (1,))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "312", "answer": "123"}')
    content = smoke.run_content(tmp_path, tmp_path / "base", 0, name)
    if name in NEEDS_MORE:
        with pytest.raises(Mistakes, match=f"algorithm.name={name}.*{NEEDS_MORE[name]}"):
            parse(content, where="run.yaml")
    else:
        assert parse(content, where="run.yaml").learner.algorithm.name == name


def test_an_unknown_algorithm_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="algorithm magic is not a preset; choose one of grpo, "):
        smoke.run(tmp_path / "run", seed=0, on_event=print, algorithm="magic")
    assert not (tmp_path / "run").exists()
