"""`headrace environment try`: one sample with answers from the shell; mistakes are one line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deploy.cli import app

HERE = "tests.rollout_server.environments.plugins"


def test_all_that_is_said_and_earned_is_shown() -> None:
    result = CliRunner().invoke(app, ["environment", "try", "calculator", "--record", '{"prompt": "3*4", "answer": "12"}', "--answer", "3*4=", "--answer", "12", "--answer", "unheard"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["user: 3*4", "answer 0: 3*4=  ->  no reward, goes on", "user: 12", "answer 1: 12  ->  reward 1 (asked 1), done", "1 of the answers came after its end", "reward 1"]


MISTAKES = [
    (["calc"], "is none of calculator, tower_of_hanoi, module:Class, grpc://host:port; give one of them"),
    (["nowhere:X"], "module 'nowhere' was not found; start in the folder that holds it"),
    ([f"{HERE}:Missing"], "has no 'Missing'; it has "),
    (["calculator", "--options", '{"a": 1}'], "unexpected keyword argument 'a'"),
    (["calculator", "--record", "[1]"], "--record must be a JSON object, it is list"),
    (["calculator", "--options", "{"], "--options is no JSON"),
    ([f"{HERE}:Bad", "--record", '{"how": "raise"}', "--answer", "x"], "a sample of a run would be unusable (environment_error)"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["environment", "try", *arguments])
    told = [line for line in result.stderr.splitlines() if line.startswith("headrace: ")]
    assert result.exit_code == 2 and len(told) == 1 and words in told[0], result.output
