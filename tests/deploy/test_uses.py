"""`headrace validate` and `headrace doctor FILE`: what a run file names is there, or one line says that it is not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.doctor.run_file import named_findings, not_looked_at
from deploy.schema import load
from deploy.uses import Use, wrong

MODULE = """
import os
NUMBER = 7

class Game:
    def __init__(self, size=3): raise RuntimeError("nobody makes one to look at it")
    def reset(self, task): ...
    def step(self, action): ...

class NoGame:
    def reset(self, task): ...

def score(prompt, completion, fields, *, weight=1.0): return weight
def agent(task, base_url, api_key): ...
def loss(logprobs): ...
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder, from which the command is called."""
    for name, text in {"mine": MODULE, "leaves": "import os\nos._exit(3)", "raises": "1 / 0", "hangs": "import time\ntime.sleep(600)", "talks": "print('{}')\n" + MODULE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


def a_file(folder: Path, *, reward: dict[str, Any] | None = None, environment: dict[str, Any] | None = None, algorithm: dict[str, Any] | None = None, **changes: Any) -> Path:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 10}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    content: dict[str, Any] = {
        "run_dir": str(folder / "run"), "model": str(model),
        "learner": {"data": {"prompts": str(folder / "prompts.jsonl")}, **({"algorithm": algorithm} if algorithm else {})},
        "rollout": {"environments": [{"name": "game", **environment}]} if environment else {},
        "reward": {"scorers": [{"name": "a", **(reward or {"use": "exact"})}], "load_limit_s": 20.0}, **changes,
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(json.dumps(content, indent=1))
    return file


def found(file: Path) -> list[str]:
    return named_findings(load(file), file)


GOOD: list[dict[str, Any]] = [
    {"reward": {"use": "mine:score", "args": {"weight": 2.0}}},
    {"reward": {"use": "regex", "args": {"pattern": "a+"}}},
    {"environment": {"use": "mine:Game", "options": {"size": 4}}},
    {"environment": {"use": "mine:agent", "agent": True}, "rollout": {"openai": {"address": "127.0.0.1:0"}, "environments": [{"name": "game", "use": "mine:agent", "agent": True}]}},
    {"algorithm": {"loss": {"kind": "custom", "function": "mine:loss"}}},
    {"reward": {"use": "talks:score"}},
]  # fmt: skip


@pytest.mark.parametrize("named", GOOD, ids=str)
def test_what_is_there_is_no_finding_and_nothing_of_it_is_called(tmp_path: Path, named: dict[str, Any]) -> None:
    assert found(a_file(tmp_path, **named)) == []


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"reward": {"use": "nowhere:score"}}, "reward.scorers.0.use=nowhere:score: ", "module 'nowhere' was not found; start the server in the folder that holds it"),
    ({"reward": {"use": "mine:scoer"}}, "reward.scorers.0.use=mine:scoer: ", "has no 'scoer'"),
    ({"reward": {"use": "mine:score", "args": {"weihgt": 2.0}}}, "reward.scorers.0.use=mine:score: ", "does not fit (prompt, completion, fields) with args {'weihgt': 2.0}"),
    ({"reward": {"use": "regex", "args": {"pattern": "("}}}, "reward.scorers.0.use=regex: ", "pattern='(' is not a regular expression"),
    ({"reward": {"use": "reward_model", "args": {"modle": "x"}}}, "reward.scorers.0.use=reward_model: ", "does not fit (prompt, completion, fields) with args {'modle': 'x'}"),
    ({"reward": {"use": "raises:score"}}, "reward.scorers.0.use=raises:score: ", "module 'raises' raised at import: ZeroDivisionError: division by zero"),
    ({"reward": {"use": "leaves:score"}}, "reward.scorers.0.use=leaves:score: ", "its process ended (exit code 3) while it was imported"),
    ({"environment": {"use": "nowhere:Game"}}, "rollout.environments.0.use=nowhere:Game: ", "module 'nowhere' was not found; start in the folder that holds it"),
    ({"environment": {"use": "mine:Gmae"}}, "rollout.environments.0.use=mine:Gmae: ", "module 'mine' has no 'Gmae'; it has Game,"),
    ({"environment": {"use": "mine:NUMBER"}}, "rollout.environments.0.use=mine:NUMBER: ", "it is of type int and neither class nor function"),
    ({"environment": {"use": "mine:NoGame"}}, "rollout.environments.0.use=mine:NoGame: ", "NoGame has no step"),
    ({"environment": {"use": "mine:Game", "options": {"sice": 4}}}, "rollout.environments.0.use=mine:Game: ", "it takes (size=3), which does not fit sice"),
    ({"environment": {"use": "hangs:Game", "load_timeout_s": 0.5}}, "rollout.environments.0.use=hangs:Game: ", "it was not imported within 0.5 s"),
    ({"rollout": {"openai": {"address": "127.0.0.1:0"}, "environments": [{"name": "g", "use": "mine:score", "agent": True}]}}, "rollout.environments.0.use=mine:score: ", "does not fit task, base_url, api_key"),
    ({"algorithm": {"loss": {"kind": "custom", "function": "mine:los"}}}, "learner.algorithm.loss.function=mine:los: ", "has no function los; it has Game, NUMBER"),
    ({"algorithm": {"advantage": {"kind": "custom", "function": "raises:advantage"}}}, "learner.algorithm.advantage.function=raises:advantage: ", "module raises raised at import: ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "head", "words"), BAD, ids=lambda value: value if isinstance(value, str) and value.endswith(": ") else "")
def test_what_is_not_there_is_one_line_with_file_line_key_and_value(tmp_path: Path, named: dict[str, Any], head: str, words: str) -> None:
    file = a_file(tmp_path, **named)
    (line,) = found(file)
    where, _, said = line.removeprefix(f"{file}:").partition(": ")
    assert said.startswith(head) and words in said, line
    assert head.partition("=")[0].rpartition(".")[2] in file.read_text().splitlines()[int(where) - 1]  # the line number is the key's


def test_a_scorer_sees_no_credentials_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKPLACE_TOKEN", "s3cret")
    (tmp_path / "peeps.py").write_text("import os\nassert 'WORKPLACE_TOKEN' not in os.environ\ndef score(prompt, completion, fields): ...")
    assert found(a_file(tmp_path, reward={"use": "peeps:score"})) == []
    assert "AssertionError" in wrong(Use(key="k", kind="scorer", name="peeps:score", limit_s=20.0, sees=dict(os.environ)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "one/two/three"}, "model=one/two/three: no such folder (seen from "),
        ({"reward": {"scorers": [{"name": "a", "use": "reward_model", "args": {"model": "/no/such"}}]}}, "reward.scorers.0.args.model=/no/such: no such folder"),
        ({"learner": {"data": {"prompts": "prompts.jsonl"}, "evaluation": {"prompts": "held.jsonl"}}}, "learner.evaluation.prompts=held.jsonl: no such file"),
        ({"learner": {"data": {"prompts": "prompts.jsonl"}, "push": {"folder": "prompts.jsonl/weights"}}, "rollout": {"weights_folder": "prompts.jsonl/weights"}}, "learner.push.folder=prompts.jsonl/weights: cannot be made or written"),
        ({"run_dir": "mine.py/run"}, "run_dir=mine.py/run: cannot be made or written"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition("=")[0],
)
def test_a_model_or_file_that_is_not_there_is_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    content = {**json.loads(a_file(tmp_path).read_text()), **changes}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(content, indent=1))
    (line,) = found(file)
    assert words in line


def test_what_cannot_be_known_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--someone--cached" / "snapshots" / "0a").mkdir(parents=True)
    (tmp_path / "cache" / "models--someone--cached" / "snapshots" / "0a" / "config.json").write_text("{}")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    scorers = [{"name": "a", "use": "reward_model", "args": {"model": "someone/cached"}}, {"name": "b", "http": {"urls": ["http://h/score"]}}]
    file = a_file(tmp_path, model="models/tyni", reward=None, environment={"use": "grpc://h:1"})
    content = {**json.loads(file.read_text()), "reward": {"scorers": scorers}}
    file.write_text(json.dumps(content))
    run = load(file)
    assert not_looked_at(run) == [
        "model=models/tyni is no folder here (models/ is one, and has tiny): taken for a hub id, which is fetched at the first start and was not looked up",
        "reward.scorers.0.args.model=someone/cached is no folder here: taken for a hub id, which lies in the cache",
        "reward.scorers.0: the model of reward_model was not loaded",
        "reward.scorers.1: b is scored elsewhere, which was not asked; `headrace reward try` asks it",
        "rollout.environments.0: grpc://h:1 was not asked",
    ]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,) = named_findings(run, file)
    assert "model=models/tyni: no folder here, and nothing of it is in the hub's cache" in line


def test_the_command_says_it_and_exits_with_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(a_file(tmp_path, reward={"use": "mine:scoer"}))])
    assert result.exit_code == 2 and "reward.scorers.0.use=mine:scoer" in result.output and "Traceback" not in result.output
    good = CliRunner().invoke(app, ["validate", str(a_file(tmp_path, reward={"use": "mine:score"}))])
    assert good.exit_code == 0 and "valid" in good.output and "not checked" not in good.output
