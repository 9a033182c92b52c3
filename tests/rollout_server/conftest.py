"""A rollout server on the small engine, alone or at a fake learner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protos import rpc
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from rollout_server.config import RolloutConfig
from rollout_server.service import Service
from rollout_server.small_engine import SmallEngine
from tests.rollout_server import reference
from tests.rollout_server.fakes import FakeLearner, FakeReward


@dataclass(kw_only=True)
class Running:
    """A service under test. `serving` ends when it ends."""

    service: Service
    engine: SmallEngine
    serving: asyncio.Task[None]
    stub: Any


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tiny_model: Path) -> AsyncIterator[Start]:
    """start(step_s=0.0, **config): serves the tiny model until the test ends."""
    async with contextlib.AsyncExitStack() as stack:
        services: list[Running] = []

        async def begin(*, step_s: float = 0.0, engine: SmallEngine | None = None, **values: Any) -> Running:
            config = RolloutConfig(model=str(tiny_model), engine="small", max_model_len=256, **{"max_num_seqs": 8, **values})
            made = engine or SmallEngine(config, tiny_model, step_s=step_s)
            service = Service(config, tiny_model, made)
            serving = asyncio.create_task(service.serve())
            async with asyncio.timeout(20):
                while not service.replica.life and not serving.done():
                    await asyncio.sleep(0.01)
            channel = await stack.enter_async_context(rpc.channel(service.address))
            services.append(Running(service=service, engine=made, serving=serving, stub=rollout_pb2_grpc.RolloutServiceStub(channel)))
            return services[-1]

        yield begin
        for running in services:
            running.service.stop()
            running.service.replica.draining = True
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(running.serving, 60)


@pytest.fixture
async def learner() -> AsyncIterator[FakeLearner]:
    fake = FakeLearner()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def reward() -> AsyncIterator[FakeReward]:
    fake = FakeReward()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture(scope="session")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    return reference.perturbed(tiny_model, tmp_path_factory.mktemp("other") / "model", seed=1)
