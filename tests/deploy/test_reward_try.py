"""`headrace reward try`: a file is scored without a server, and mistakes are told by line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy.cli import app
from protos import rpc
from protos.reward.v1alpha1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from protos.security import Security
from reward_server.servicer import RewardServicer
from tests.certificates import Authority
from tests.reward_server.endpoints.conftest import plane_of

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


async def test_a_server_that_runs_is_asked_with_credentials_and_a_call_without_them_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server", days=1)
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "another").write_text("an0ther")
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    security = Security(token="s3cret", certificate=certificate, key=key)
    file = written(tmp_path, *LINES[:2], {"prompt": "6 + 5?", "completion": ["11", "7"], "answer": 11})
    async with plane_of({"name": "answer", "use": "last_number"}, {"name": "same", "use": "exact"}) as plane:
        servicer = RewardServicer(plane, max_pending=64, max_pending_bytes=1 << 20)
        server = rpc.Server("127.0.0.1:0", [lambda made: add_RewardServiceServicer_to_server(servicer, made)], security)
        await server.start()
        try:

            def tried(*arguments: str) -> Result:
                return CliRunner().invoke(app, ["reward", "try", file, "--server", f"127.0.0.1:{server.port}", *arguments])

            ca = ("--ca", str(authority.ca))
            shown = await asyncio.to_thread(tried, *ca, "--token-env", "REWARD_TOKEN")
            assert shown.exit_code == 0, shown.output
            rows = [line.split() for line in shown.stdout.splitlines()]
            assert [row[-2:] for row in rows[:5]] == [["answer", "same"], ["1", "0"], ["0", "0"], ["1", "1"], ["0", "0"]]
            assert [row[0] for row in rows[1:5]] == ["1", "2", "3.0", "3.1"]
            one = await asyncio.to_thread(tried, *ca, "--token-file", str(tmp_path / "token"), "--only", "same", "--json")
            assert [json.loads(line)["score"] for line in one.stdout.splitlines()] == [0.0, 0.0, 1.0, 0.0]
            for arguments, words in (
                (ca, "asks for a bearer token, and none was given; give --token-file or --token-env"),
                ((*ca, "--token-file", str(tmp_path / "another")), "takes another one than was given"),
                (("--token-env", "REWARD_TOKEN"), "it speaks TLS (give --ca)"),
                ((*ca, "--token-env", "REWARD_TOKEN", "--only", "nobody"), "--only nobody: 127.0.0.1:"),
            ):
                refused = await asyncio.to_thread(tried, *arguments)
                told = [line for line in refused.stderr.splitlines() if line.startswith("headrace: ")]
                assert refused.exit_code == 2 and len(told) == 1 and words in told[0], refused.stderr
        finally:
            await server.stop(0.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--server", "127.0.0.1:1", "--scorer", "a=exact"], "--server 127.0.0.1:1 with --scorer: that server has scorers of its own"),
        (["--scorer", "a=exact", "--token-env", "HOME"], "are for --server, and it is not given"),
        (["--server", "nowhere"], "--server"),
    ],
)
def test_what_belongs_to_a_server_and_what_to_scorers_here_is_not_mixed(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reward", "try", written(tmp_path, *LINES), *arguments])
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1


def test_without_any_scorer_it_says_how_to_name_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reward", "try", written(tmp_path, *LINES)])
    assert result.exit_code == 2 and "nothing says what scores: give --scorer NAME=USE" in result.stderr
