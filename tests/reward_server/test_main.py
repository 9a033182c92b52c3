"""Starting and stopping the service: mistakes are one line and exit code 2, signals end it in good order."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import config_file
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from reward_server.config import RewardConfig
from tests.reward_server.service import serving, start, workers_of

ONE = {"name": "one", "use": "mine:score"}


def write_scorer(folder: Path) -> None:
    (folder / "mine.py").write_text("def score(prompt, completion, fields):\n    '''One.'''\n    return 1.0\n")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"scorers": [{"name": "a", "use": "exakt"}]}, "did you mean 'exact'"),
        ({"scorers": [{"name": "a", "use": "nowhere:f"}]}, "module 'nowhere' was not found"),
        ({"scorers": [ONE], "worker": 3}, "worker: unknown key (value 3): remove it"),
        ({"scorers": [ONE], "workers": 0}, "workers: Input should be greater than or equal to 1, got 0"),
        ({"scorers": [ONE], "default": "two"}, "default='two' is none of the scorers"),
        ([1], "must hold a mapping"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path, config: Any, words: str) -> None:
    write_scorer(tmp_path)
    process = start(tmp_path, config)
    _, errors = process.communicate(timeout=30)
    (line,) = [line for line in errors.splitlines() if line.startswith("headrace: ")]
    assert process.returncode == 2 and words in line and "Traceback" not in errors


def test_an_address_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    write_scorer(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        process = start(tmp_path, {"address": address, "scorers": [ONE]})
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and f"headrace: cannot listen on {address}: Address already in use" in errors and "Traceback" not in errors
    assert "add_port" not in errors, "gRPC would tell the same in a line of its own"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.yaml: No such file"):
        config_file.read(tmp_path / "none.yaml", RewardConfig)


def test_a_configuration_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text(json.dumps({"scorers": [ONE], "workers": 2}))
    assert config_file.read(tmp_path / "reward.json", RewardConfig).workers == 2


def test_every_mistake_of_a_file_has_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("scorers: [{name: a, use: exact}]\nmax_slow: 0\nworkers: none\n")
    with pytest.raises(ValueError) as caught:
        config_file.read(path, RewardConfig)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}: workers: ") and first.endswith("got 'none'; correct it") and second.startswith(f"{path}: max_slow: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_with_code_0_and_all_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    write_scorer(tmp_path)
    with serving(tmp_path, {"scorers": [ONE]}) as (_, process):
        workers = workers_of(process.pid)
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_scorer_processes_die_with_a_killed_service(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\ndef score(prompt, completion, fields): time.sleep(60)\n")
    with serving(tmp_path, {"scorers": [ONE]}) as (address, process), grpc.insecure_channel(address) as channel:
        answers = RewardServiceStub(channel).Score(iter([pb.ScoreRequest(id="1")]))
        time.sleep(0.5)  # one process is busy and reads nothing
        workers = workers_of(process.pid)
        process.kill()
        answers.cancel()
        until_s = time.monotonic() + 40
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < until_s, "scorer processes outlive the service"
            time.sleep(0.05)
        assert workers
