"""Processes are started beside gRPC's threads and uvloop, and none dies of that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import asyncio, collections, {package}
import grpc, uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

async def main():
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    over, codes = asyncio.Event(), collections.Counter()

    async def call():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
            while not over.is_set():
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    calls = [asyncio.create_task(call()) for _ in range(6)]
    for _ in range(100):
        process = await asyncio.create_subprocess_exec("/bin/true", start_new_session=True)
        codes[await process.wait()] += 1
    over.set()
    await asyncio.gather(*calls)
    await server.stop(0)
    print(dict(codes))

uvloop.run(main())
"""


@pytest.mark.parametrize("package", ["rollout_server", "reward_server", "learner", "deploy"])
def test_a_hundred_processes_started_while_calls_run_all_live(package: str) -> None:
    # with gRPC's own handlers around fork about one in eight died before its first instruction
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run([sys.executable, "-c", CODE.format(package=package)], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=True)
    assert ended.stdout.strip() == "{0: 100}", ended.stderr[-2000:]
    assert "fork_posix" not in ended.stderr
