"""A real vLLM server through deaths, a stall and its own end: clients are told, figures are true, nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import faultpoints, rpc
from protos.arrays import pack_ids
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.rollout_server.reference import perturbed
from tests.system.harness import Run, Service, free_port, wait_for
from tests.system.soak.__main__ import scrape
from tests.system.soak.clients import Answer, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

PROMPT = [70 + i % 90 for i in range(70)]  # two whole KV blocks and a part
STALL_S = 8.0


class Server:
    """One server process whose faults are planted while it runs."""

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        self.run, self.port, self.fault = Run(folder=folder, model=model), free_port(), folder / "fault"
        config = {
            "model": str(model), "engine": "vllm", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_bytes": 64 << 20, "threads": 1, "stall_s": STALL_S,
            "metrics_address": f"127.0.0.1:{self.port}", "mirror_dir": str(folder), **settings,
        }  # fmt: skip
        self.service: Service = self.run.start("rollout", "rollout_server", config, {faultpoints.FILE: str(self.fault), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, address_file=True)
        wait_for("the server to serve", lambda: "serves" in self.service.tail(1 << 20), limit_s=300, guard=self.service.must_live)
        self.address = self.service.address()

    def figures(self) -> dict[str, float]:
        return scrape(self.port, labelled=True)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("service"), tiny_model)
    yield made
    made.run.stop()


def request(seed: int, max_new_tokens: int, prompt: list[int] = PROMPT) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_ids=pack_ids(prompt), sampling=trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=seed))


async def to_the_end(call: Any) -> None:
    """Raises AioRpcError where the call ends otherwise than in order."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def ready(stub: Any, channel: grpc.aio.Channel, limit_s: float = 180.0) -> None:
    """Until the server serves and health says so."""
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(limit_s):
        while True:
            status = await stub.GetStatus(pb.GetStatusRequest(), timeout=20)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            if status.state == pb.REPLICA_STATE_SERVING and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(0.2)


async def test_figures_are_true(server: Server) -> None:
    before = server.figures()
    async with rpc.channel(server.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        answers = await asyncio.gather(*(whole(stub, request(seed, 40)) for seed in range(8)))
        with pytest.raises(grpc.aio.AioRpcError):
            await whole(stub, request(1, 4, prompt=[100_000]))
        call = stub.Generate(request(9, 400), timeout=60)
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            while (await stub.GetStatus(pb.GetStatusRequest(), timeout=20)).num_running:
                await asyncio.sleep(0.1)
        await whole(stub, request(10, 2))  # a step, at which the scheduler tells that the cancelled one is gone
    figures = server.figures()

    def rose(name: str) -> float:
        return figures[f"headrace_rollout_{name}"] - before.get(f"headrace_rollout_{name}", 0)

    assert [len(answer.ids) for answer in answers] == [40] * 8
    assert (rose("requests_total{length}"), rose("requests_total{refused}"), rose("requests_total{cancelled}")) == (9, 1, 1)
    assert 8 * 40 + 2 < rose("tokens_total") <= 8 * 40 + 2 + 400  # and what the cancelled one was given
    # Eight samples of one prompt, the cancelled one and the last: each asks for its 70 tokens; all but the first find 64 of them.
    assert rose("prefix_tokens_total") == 10 * 70 and rose("prefix_hit_tokens_total") == 9 * 64
    assert (figures["headrace_rollout_running_requests"], figures["headrace_rollout_waiting_requests"], figures["headrace_rollout_kv_use_ratio"]) == (0, 0, 0)
    assert rose("first_tokens_total") == 10 and 0 < rose("first_token_seconds_total") < 60
    assert rose("inter_tokens_total") >= 8 * 39 and 0 < figures["headrace_rollout_inter_token_seconds{0.5}"] < 5
    assert figures["headrace_rollout_ready"] == 1 and figures["headrace_rollout_state{serving}"] == 1 and figures["headrace_rollout_loaded_version"] == 0


@pytest.mark.parametrize("action", ["kill", "raise", "hang"])
async def test_a_death_or_a_stall_with_requests_in_flight_is_told_and_mended(server: Server, action: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # SIGKILL of the engine's process; an exception in its step, as out of memory would be; a step that never ends (its process lives and
    # answers): the last is noticed by its tokens, within STALL_S and the half second between two looks.
    other = perturbed(tiny_model, tmp_path_factory.mktemp("other") / "model", seed=1)
    why = "stalled" if action == "hang" else "died"
    before = server.figures()
    async with rpc.channel(server.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        await ready(stub, channel)
        await stub.LoadWeights(pb.LoadWeightsRequest(path=str(other)), timeout=60)
        greedy = pb.GenerateRequest(prompt_ids=pack_ids(PROMPT), sampling=trajectory_pb2.SamplingParams(temperature=0.0, max_new_tokens=12))
        was: Answer = await whole(stub, greedy)
        calls = [stub.Generate(request(seed, 430), timeout=200) for seed in range(4)]
        for call in calls:
            await call.read()
        faultpoints.plant(server.fault, f"engine_step={action}")
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await to_the_end(call)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE and failed.value.details()
        async with asyncio.timeout(60):
            while server.figures()[f"headrace_rollout_engine_ends_total{{{why}}}"] == before[f"headrace_rollout_engine_ends_total{{{why}}}"]:
                await asyncio.sleep(0.2)
        await ready(stub, channel)
        again = await whole(stub, greedy)
    assert again.ids == was.ids  # the weights that LoadWeights had brought, under a higher version
    assert again.last.spans[0].version > was.last.spans[0].version
    figures = server.figures()
    assert figures[f"headrace_rollout_engine_ends_total{{{why}}}"] == before[f"headrace_rollout_engine_ends_total{{{why}}}"] + 1
    assert figures["headrace_rollout_requests_total{failed}"] == before["headrace_rollout_requests_total{failed}"] + 4
    assert "nothing for" in server.service.tail(1 << 20) or action != "hang"


async def test_sigterm_lets_streams_end_and_leaves_nothing_behind(server: Server) -> None:
    children = psutil.Process(server.service.process.pid).children(recursive=True)
    async with rpc.channel(server.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        await ready(stub, channel)
        reading = [asyncio.create_task(whole(stub, request(seed, 150))) for seed in range(4)]
        async with asyncio.timeout(60):
            while (await stub.GetStatus(pb.GetStatusRequest(), timeout=20)).num_running < 4:
                await asyncio.sleep(0.05)
        server.service.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*reading)
    assert [len(answer.ids) for answer in answers] == [150] * 4
    assert await asyncio.to_thread(server.service.process.wait, 60) == 0
    psutil.wait_procs(children, timeout=20)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


async def test_a_worker_of_two_that_dies_takes_its_engine_along_and_both_come_back(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(tmp_path, tiny_model, tensor_parallel=2)
    try:
        async with rpc.channel(server.address) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            await ready(stub, channel)
            calls = [stub.Generate(request(seed, 430), timeout=200) for seed in range(2)]
            for call in calls:
                await call.read()
            faultpoints.plant(server.fault, "engine_step=kill")  # the first of the two to pass takes it
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await to_the_end(call)
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(60):
                while (await stub.GetStatus(pb.GetStatusRequest(), timeout=20)).state == pb.REPLICA_STATE_SERVING:
                    await asyncio.sleep(0.2)
            await ready(stub, channel, limit_s=240)
            assert len((await whole(stub, request(1, 20))).ids) == 20
    finally:
        server.run.stop()
