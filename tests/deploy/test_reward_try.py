"""`headrace reward try`: a file is scored without a server, and mistakes are told by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app

LINES = [
    {"prompt": "6 + 5?", "completion": "6 + 5 = 11.", "answer": 11},
    {"prompt": "6 + 5?", "completion": "twelve, I would say, for no reason that I could give", "answer": 11},
    {"prompt": "Where?", "completion": "5", "answer": "Paris"},
]


def written(folder: Path, *lines: object) -> str:
    file = folder / "answers.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_every_scorer_has_a_column_and_what_is_unscored_says_why(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reward", "try", written(tmp_path, *LINES), "--scorer", "answer=last_number", "--scorer", "same=exact"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["line", "completion", "answer", "same"]
    assert rows[1] == ["1", "6", "+", "5", "=", "11.", "1", "0"]
    assert rows[2][-3:] == ["rea…", "0", "0"]  # 31 characters and the dots
    assert rows[3] == ["3", "5", "unscored(bad_reference)", "0"]
    assert "line 3, answer: field 'answer' must hold a number" in result.stdout
    assert "answer: 2 of 3 scored, mean 0.5, from 0 to 1; unscored: bad_reference 1; seconds: median" in result.stdout


def test_a_list_of_completions_is_a_group_and_json_is_one_object_a_score(tmp_path: Path) -> None:
    (tmp_path / "reward.yaml").write_text("scorers: [{name: length, use: length, args: {most: 1, slack: 4}}, {name: rank, group: {op: rank, of: length}}]")
    file = written(tmp_path, {"question": "?", "answers": ["a", "abc", "abcde"]})
    arguments = ["reward", "try", file, "--config", str(tmp_path / "reward.yaml"), "--only", "rank", "--completion-field", "answers", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    # lengths 1, 3, 5: 1, 1/2, 0; ranks 2, 1, 0 of 2
    assert [(each["sample"], each["score"], each["parts"]) for each in found] == [(0, 1.0, {"score": 1.0}), (1, 0.5, {"score": 0.5}), (2, 0.0, {"score": 0.0})]


MISTAKES = [
    (["{torn"], [], "line 1: not JSON"),
    (["[1]"], [], "line 1: holds list, not an object"),
    ([{"completion": "a"}, {"prompt": "p"}], [], "line 2: field 'completion' must be text"),
    ([{"completion": "a", "prompt": 5}], [], "line 1: field 'prompt' must be text"),
    ([""], [], "holds no lines"),
    ([{"completion": "a"}], ["--only", "nobody"], "--only nobody: none of the scorers answer"),
    ([{"completion": "a"}], ["--scorer", "x=exakt"], "'exakt' is no built-in scorer; did you mean 'exact'?"),
]


@pytest.mark.parametrize(("lines", "arguments", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_and_exit_code_2(lines: list[object], arguments: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reward", "try", written(tmp_path, *lines), "--scorer", "answer=exact", *arguments])
    told = [line for line in result.stderr.splitlines() if line.startswith("headrace: ")]
    assert result.exit_code == 2 and len(told) == 1 and words in told[0]
