"""The README's endpoint, word for word: its code is served by its command, and its four lines of YAML plug it in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.struct_pb2 import Struct

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc

ROOT = Path(__file__).resolve().parents[3]
TEXTS = {"0": "", "1": "x" * 50, "2": "x" * 400}


def blocks() -> tuple[str, str, list[str], list[str]]:
    """Code, YAML and both commands, as they stand in the README under `endpoint.py`."""
    section = (ROOT / "README.md").read_text().partition("`endpoint.py`")[2]
    found = dict(reversed(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)[:3]))
    serve, headrace = found["sh"].splitlines()
    return found["python"], found["yaml"], serve.split(), headrace.split()


@contextmanager
def started(command: list[str], folder: Path, announces: str) -> Iterator[str]:
    """What a process prints as its address, found by the words before it; the process ends with the block."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:  # ends when the process does
            said.append(line)
            if found := re.search(announces + r"([\d.]+:\d+)", line):
                yield found.group(1)
                return
        raise AssertionError("".join(said))
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.timeout(90)
async def test_the_endpoint_of_the_readme_is_plugged_in_by_its_four_lines_of_yaml(tmp_path: Path) -> None:
    code, yaml, serve, headrace = blocks()
    assert len(yaml.splitlines()) == 4 and serve[:2] == ["uvicorn", "endpoint:app"] and headrace[:3] == ["headrace", "serve", "reward"]
    (tmp_path / "endpoint.py").write_text(code)
    there = "127.0.0.1:9000"
    assert serve[-2:] == ["--port", "9000"] and there in yaml
    with started([sys.executable, "-m", *serve[:-1], "0"], tmp_path, "running on http://") as address:  # a free port, since others test here, too
        (tmp_path / "reward.yaml").write_text(yaml.replace(there, address))
        with started([sys.executable, "-m", "deploy.cli", *headrace[1:-1], "127.0.0.1:0"], tmp_path, "serving on ") as served:
            requests = [reward_pb2.ScoreRequest(id=name, prompt="p", completion=text, fields=Struct()) for name, text in TEXTS.items()]
            async with rpc.channel(served) as channel:
                answers = {each.id: each async for each in reward_pb2_grpc.RewardServiceStub(channel).Score(iter(requests), timeout=30)}
    assert {name: answer.reward.score.value for name, answer in answers.items()} == {"0": 1.0, "1": 0.75, "2": 0.0}, json.dumps(yaml)  # 1 - 50 / 200
