"""A whole launched run with TLS and a token at every service, all from its configuration: strangers are refused and counted, the run goes on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from deploy.demo import sorting
from deploy.progress import read_all
from protos import rpc
from protos.arrays import pack_ids
from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc, learner_pb2, learner_pb2_grpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.certificates import Authority
from tests.deploy.test_whole_run import SMALL, learner_fields, processes_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
TOKEN = "s3cret-of-this-whole-run"
Ask = Callable[[grpc.aio.Channel], Awaitable[int]]


async def ask_learner(channel: grpc.aio.Channel) -> int:
    return int((await learner_pb2_grpc.LearnerServiceStub(channel).GetStatus(learner_pb2.GetStatusRequest(), timeout=10)).num_refused)


async def ask_rollout(channel: grpc.aio.Channel) -> int:
    return int((await rollout_pb2_grpc.RolloutServiceStub(channel).GetStatus(rollout_pb2.GetStatusRequest(), timeout=10)).num_refused)


async def ask_reward(channel: grpc.aio.Channel) -> int:
    return int((await reward_pb2_grpc.RewardServiceStub(channel).ListScorers(reward_pb2.ListScorersRequest(), timeout=10)).num_refused)


async def ask_feed(channel: grpc.aio.Channel) -> int:
    """As a rank that never existed: let in, it is refused for what it says; else for who it is."""
    await feed_pb2_grpc.FeedServiceStub(channel).EndUpdate(feed_pb2.EndUpdateRequest(), timeout=10)
    return 0


def launch(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "launcher.log").open("w") as log:
        return subprocess.Popen([sys.executable, "-m", "deploy.cli", "launch", str(folder / "run.yaml")], cwd=ROOT, stderr=log, start_new_session=True)


@pytest.fixture
async def launched(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Path, Authority]]:
    """The folder of a run that makes steps, launched from one file that has the section `security`, and who signed its certificate."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server", days=1)
    (tmp_path / "token").write_text(TOKEN)
    prompts = tmp_path / "train.jsonl"
    digits = sorting.training(200, seed=0, excluded=[])
    prompts.write_text("".join(json.dumps({"prompt": sorting.prompt(each), "answer": sorting.answer(each)}) + "\n" for each in digits))
    run_dir = tmp_path / "run"
    content = {
        "run_dir": str(run_dir), "model": str(tiny_model), "rollout": SMALL,
        "learner": {**learner_fields(10_000), "data": {"prompts": str(prompts), "template": "raw"}},
        "reward": {"scorers": [{"name": "sorted", "use": "deploy.demo.sorting:score"}]},
        "security": {"certificate": str(certificate), "key": str(key), "ca": str(authority.ca), "token_file": str(tmp_path / "token")},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    process = launch(tmp_path)
    try:
        await asyncio.to_thread(until, lambda: process.poll() is not None or len(read_all(run_dir / "metrics.jsonl")) >= 2, 100)
        assert process.poll() is None, (tmp_path / "launcher.log").read_text()
        yield run_dir, authority
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 130, (tmp_path / "launcher.log").read_text()
    assert not processes_of(tmp_path)
    files = [file for file in [tmp_path / "launcher.log", *run_dir.rglob("*")] if file.is_file()]
    assert len(files) > 10 and not [file for file in files if TOKEN.encode() in file.read_bytes()]


async def refusal(address: str, ask: Ask, security: rpc.Security) -> grpc.StatusCode:
    async with rpc.channel(address, security) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(ask(channel), 20)
    return caught.value.code()


async def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "deploy.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


async def test_every_service_of_a_launched_run_refuses_strangers_and_counts_them_while_the_run_goes_on(launched: tuple[Path, Authority], tmp_path: Path) -> None:
    run_dir, authority = launched
    stranger = Authority(tmp_path, "stranger")
    right = rpc.Security(token=TOKEN, ca=authority.ca)
    addresses = {file.stem: json.loads(file.read_text())["address"] for file in (run_dir / "resolved" / "launch").glob("*.json")}
    services: dict[str, Ask] = {"learner": ask_learner, "rollout-0": ask_rollout, "reward-0": ask_reward}

    async def counted(name: str) -> int:
        async with rpc.channel(addresses[name], right) as channel:
            return await services[name](channel)

    for name, ask in services.items():
        before = await counted(name)
        for wrong in (rpc.Security(token="another", ca=authority.ca), rpc.Security(ca=authority.ca)):
            assert await refusal(addresses[name], ask, wrong) is grpc.StatusCode.UNAUTHENTICATED
        tokens = await counted(name)
        assert tokens >= before + 2, name
        assert await refusal(addresses[name], ask, rpc.Security(token=TOKEN)) is grpc.StatusCode.UNAVAILABLE  # a plain client
        plain = await counted(name)
        assert plain > tokens, name
        assert await refusal(addresses[name], ask, rpc.Security(token=TOKEN, ca=stranger.ca)) is grpc.StatusCode.UNAVAILABLE
        assert await counted(name) > plain, name

    before = await counted("learner")  # the trainer's feed is served by the learner's gateway, behind the same door
    assert await refusal(addresses["learner"], ask_feed, rpc.Security(ca=authority.ca)) is grpc.StatusCode.UNAUTHENTICATED
    assert await refusal(addresses["learner"], ask_feed, rpc.Security(token=TOKEN)) is grpc.StatusCode.UNAVAILABLE
    assert await refusal(addresses["learner"], ask_feed, right) is not grpc.StatusCode.UNAUTHENTICATED
    assert await counted("learner") >= before + 2

    at_expiry = {name: await counted(name) for name in services}
    authority.sign("server", days=-1)
    for name, ask in services.items():
        assert await refusal(addresses[name], ask, right) is grpc.StatusCode.UNAVAILABLE, name
    made = len(read_all(run_dir / "metrics.jsonl"))
    await asyncio.to_thread(until, lambda: len(read_all(run_dir / "metrics.jsonl")) >= made + 2, 60)  # who is connected stays so
    authority.sign("server", days=1)
    assert all([await counted(name) > at_expiry[name] for name in services])  # renewed without a restart

    await the_command_line(run_dir, addresses, authority, tmp_path)
    assert 1 <= await generated(addresses["rollout-0"], right) <= 4


async def the_command_line(run_dir: Path, addresses: dict[str, str], authority: Authority, folder: Path) -> None:
    """A run folder has its credentials; an address needs them from options, and says so."""
    own = await headrace("status", str(run_dir))
    assert own.returncode == 0 and "calls and connections without this run's token or TLS" in own.stdout and "replicas: 1" in own.stdout, own.stderr
    credentials = ("--ca", str(authority.ca), "--token-file", str(folder / "token"))
    there = await headrace("status", addresses["learner"], *credentials)
    assert there.returncode == 0 and "step" in there.stdout, there.stderr
    none = await headrace("status", addresses["learner"], "--ca", str(authority.ca))
    assert none.returncode == 2 and none.stderr.splitlines()[-1].endswith("none was given; give --token-file or --token-env")
    (folder / "lines.jsonl").write_text(json.dumps({"prompt": "312>", "completion": "123", "answer": "123"}) + "\n")
    tried = await headrace("reward", "try", str(folder / "lines.jsonl"), "--server", addresses["reward-0"], *credentials, "--json")
    assert json.loads(tried.stdout)["score"] == 1.0, tried.stderr
    report = await headrace("report", str(run_dir))
    assert report.returncode == 0 and TOKEN not in Path(report.stdout.strip()).read_text()
    assert TOKEN not in own.stdout + there.stdout + tried.stdout + none.stderr


async def generated(address: str, security: rpc.Security) -> int:
    """Number of tokens that a client with credentials gets of a replica of this run."""
    request = rollout_pb2.GenerateRequest(prompt_ids=pack_ids([49, 50, 51]), sampling=trajectory_pb2.SamplingParams(temperature=1, top_p=1, max_new_tokens=4))
    num_bytes = 0
    async with rpc.channel(address, security) as channel:
        answers: Any = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=30)
        async for answer in answers:
            num_bytes += len(answer.token_ids.data)
    return num_bytes // 4
