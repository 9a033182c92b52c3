"""Inputs that were made to hurt, through a served reward server: each has its stated outcome in time, and the service is as before."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.reward_server import service

LIMIT_S = 6.0
TEN_MB = 10_000_000
SCORERS: list[dict[str, Any]] = [
    {"name": "exact", "use": "exact"},
    {"name": "last_number", "use": "last_number"},
    {"name": "length", "use": "length", "args": {"most": 100, "unit": "words"}},
    {"name": "words", "use": "regex", "args": {"pattern": "(x+x+)+y"}},
    {"name": "format", "use": "format"},
    {"name": "repetition", "use": "repetition", "args": {"n": 3}},
    {"name": "json", "use": "json_schema", "args": {"schema": {"type": "array"}}},
    {"name": "json_pattern", "use": "json_schema", "args": {"schema": {"pattern": "(x+x+)+y"}}},
    {"name": "math", "use": "math"},
    {"name": "overlong", "use": "overlong", "args": {"most": 100, "buffer": 20}},
    {"name": "judge", "judge": {"urls": ["http://127.0.0.1:9/v1"], "model": "m", "template": "{{ prompt }}{{ completion }}"}},
    {"name": "together", "combine": {"op": "sum", "of": {"overlong": 1, "repetition": 1}}},
    {"name": "code", "use": "code", "args": {"test_s": 1.0, "wall_s": 1.5, "extract": "raw", "memory_bytes": 268435456}},
]
TESTS = [{"input": "", "output": "5"}]
# scorer, completion, fields, outcome: a number, or the reason of being unscored
TABLE: list[tuple[str, str, dict[str, Any], float | str]] = [
    ("exact", "a " * (TEN_MB // 2), {"answer": "5"}, 0.0),
    ("exact", "\0" * 1000, {"answer": "5"}, 0.0),
    ("last_number", "9" * TEN_MB, {"answer": "5"}, 0.0),
    ("last_number", "1,234," * (TEN_MB // 6), {"answer": "5"}, 0.0),
    ("length", "a " * (TEN_MB // 2), {}, 0.0),
    ("words", "x" * 60, {}, "timeout"),  # a catastrophic pattern
    ("format", "<think>" * (TEN_MB // 7), {}, 0.0),
    ("repetition", "a " * (TEN_MB // 2), {}, -1.0),
    ("overlong", "é" * (TEN_MB // 2), {}, -1.0),
    ("judge", "a" * TEN_MB, {}, "refused"),  # above max_chars: it is never sent
    ("together", "a " * (TEN_MB // 2), {}, -2.0),
    ("together", "\ufffe\u202e\u0000" * 1000, {}, -1.0),  # no character, one that turns the line round, a null byte: 3,000 characters, one word
    ("json", "[" * TEN_MB, {}, 0.0),
    ("json", "[" * 200_000 + "]" * 200_000, {}, 0.0),
    ("json", "[" + "9" * 1_000_000 + "]", {}, 0.0),
    ("json", '["\\ud800"]', {}, 1.0),  # half a pair, as JSON writes it
    ("json_pattern", '"' + "x" * 60 + '"', {}, "timeout"),
    ("math", r"\boxed{" + r"\frac{1}{" * 3000 + "1" + "}" * 3001, {"answer": "5"}, 0.0),
    ("math", r"\boxed{" * (TEN_MB // 7), {"answer": "5"}, 0.0),
    ("math", r"\boxed{99^{99^{99}}}", {"answer": "5"}, 0.0),
    ("math", "$" * TEN_MB, {"answer": "5"}, 0.0),
    ("math", "5", {"answer": "Paris"}, "bad_reference"),
    ("code", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"tests": TESTS}, 0.0),
    ("code", "while True: print('x' * 1000)", {"tests": TESTS}, 0.0),
    ("code", "x = bytearray(10 << 30)", {"tests": TESTS}, 0.0),
    ("code", "# " + "x" * TEN_MB + "\nprint(5)", {"tests": TESTS}, 1.0),
    ("code", "(" * 100_000, {"tests": TESTS}, 0.0),
    ("code", "print(5)\0", {"tests": TESTS}, 0.0),
]


def outcome(reward: trajectory_pb2.Reward) -> float | str:
    if reward.WhichOneof("outcome") == "score":
        return round(reward.score.value, 3)
    return trajectory_pb2.UnscoredReason.Name(reward.unscored.reason).removeprefix("UNSCORED_REASON_").lower()


async def scored(stub: RewardServiceStub, item: tuple[str, str, dict[str, Any], Any]) -> tuple[float | str, float]:
    """(outcome, seconds)."""
    name, completion, fields, _ = item
    request = pb.ScoreRequest(id="1", scorer=name, prompt="p", completion=completion)
    request.fields.update(fields)
    began_s = time.monotonic()
    async for response in stub.Score(iter([request]), timeout=60):
        return outcome(response.reward), time.monotonic() - began_s
    raise AssertionError("no answer")


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_hostile_input_has_its_stated_outcome_in_time_and_leaves_the_service_healthy(tmp_path: Path) -> None:
    config = {"scorers": [{**scorer, "limit_s": LIMIT_S} for scorer in SCORERS], "workers": 2, "spares": 1, "max_slow": 2}
    with service.serving(tmp_path, config) as (address, process):
        async with rpc.channel(address) as channel:
            stub = RewardServiceStub(channel)
            plain = ("exact", "5", {"answer": "5"}, 1.0)
            assert (await scored(stub, plain))[0] == 1.0
            await scored(stub, ("math", "5", {"answer": "5"}, 1.0))
            before = psutil.Process(process.pid).memory_info().rss
            wrong = []
            for item in TABLE:
                found, seconds = await scored(stub, item)
                if found != item[3] or seconds > LIMIT_S + 4.0:  # a replaced process may have to be started first
                    wrong.append((item[0], item[1][:40], item[3], found, seconds))
                assert (await scored(stub, plain))[0] == 1.0
            assert wrong == []
            assert await _settled(process.pid, before + (56 << 20))
            level = psutil.Process(process.pid).memory_info().rss
            for item in [each for each in TABLE if len(each[1]) > TEN_MB // 3]:  # once more: what the first pass left is all that is ever left
                assert (await scored(stub, item))[0] == item[3]
            assert await _settled(process.pid, level + (48 << 20))
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(ValueError, match="surrogates"):  # half a pair cannot be put into a message at all
                pb.ScoreRequest(completion="\ud800")
            print(f"memory of the service: {before >> 20} MiB before, {level >> 20} after one pass, {psutil.Process(process.pid).memory_info().rss >> 20} after two")


async def _settled(pid: int, most_bytes: int) -> bool:
    """Whether the service's memory, and the number of its processes, come back to about what they were."""
    service_process = psutil.Process(pid)
    for _ in range(300):
        if service_process.memory_info().rss <= most_bytes and len(service_process.children(recursive=True)) <= 5:  # workers + spares + slow ones about to be retired
            return True
        await asyncio.sleep(0.1)
    return False


async def test_a_caller_that_sends_what_is_no_request_gets_a_status_and_others_go_on(tmp_path: Path) -> None:
    with service.serving(tmp_path, {"scorers": SCORERS[:1]}) as (address, _):
        async with rpc.channel(address) as channel:
            raw: Any = channel.stream_stream("/protos.reward.v1alpha1.RewardService/Score")
            call = raw(iter([b"\xff" * 1000]), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError):
                async for _answer in call:
                    pass
            assert (await scored(RewardServiceStub(channel), ("exact", "5", {"answer": "5"}, 1.0)))[0] == 1.0
