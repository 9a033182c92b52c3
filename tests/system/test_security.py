"""TLS and the token at each of the three services: who is let in, who is not, and that it is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import rpc
from protos.learner.v1alpha1 import learner_pb2, learner_pb2_grpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.security import SecurityConfig, resolve
from reward_server.plane import Plane
from reward_server.scorers_at_work import ScorersAtWork
from reward_server.servicer import RewardServicer
from rollout_server.config import RolloutConfig
from rollout_server.service import Service
from rollout_server.small_engine import SmallEngine
from tests.certificates import Authority
from tests.learner.gateway.gateway_harness import config_in, running

TOKEN = "s3cret-of-the-run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A service under test: where it is, and one plain call of it, which answers num_refused."""

    address: str
    ask: Callable[[grpc.aio.Channel], Awaitable[int]]


@asynccontextmanager
async def learner(security: SecurityConfig, folder: Path, model: Path) -> AsyncIterator[Served]:
    async def ask(channel: grpc.aio.Channel) -> int:
        return int((await learner_pb2_grpc.LearnerServiceStub(channel).GetStatus(learner_pb2.GetStatusRequest(), timeout=10)).num_refused)

    async with running(config_in(folder, security=security)) as gateway:
        yield Served(address=f"127.0.0.1:{gateway.port}", ask=ask)


@asynccontextmanager
async def rollout(security: SecurityConfig, folder: Path, model: Path) -> AsyncIterator[Served]:
    async def ask(channel: grpc.aio.Channel) -> int:
        return int((await rollout_pb2_grpc.RolloutServiceStub(channel).GetStatus(rollout_pb2.GetStatusRequest(), timeout=10)).num_refused)

    config = RolloutConfig(model=str(model), engine="small", max_model_len=64, max_num_seqs=2, security=security)
    service = Service(config, model, SmallEngine(config, model))
    serving = asyncio.create_task(service.serve())
    try:
        while not service.server.port:
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.01)
        yield Served(address=service.address, ask=ask)
    finally:
        service.stop()
        with suppress(Exception):
            await asyncio.wait_for(serving, 20)


@asynccontextmanager
async def reward(security: SecurityConfig, folder: Path, model: Path) -> AsyncIterator[Served]:
    async def ask(channel: grpc.aio.Channel) -> int:
        return int((await reward_pb2_grpc.RewardServiceStub(channel).ListScorers(reward_pb2.ListScorersRequest(), timeout=10)).num_refused)

    servicer = RewardServicer(Plane(ScorersAtWork({}, pool=None, endpoints=()), default=""), max_pending=1, max_pending_bytes=1)
    made = rpc.Server("127.0.0.1:0", [lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)], resolve(security))
    servicer.refused = lambda: made.guard.num_refused
    await made.start()
    try:
        yield Served(address=f"127.0.0.1:{made.port}", ask=ask)
    finally:
        await made.stop(0.0)


async def refusal(served: Served, security: rpc.Security) -> grpc.StatusCode:
    """How a call with other credentials ends."""
    async with rpc.channel(served.address, security) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(served.ask(channel), 20)
    return caught.value.code()


@pytest.mark.parametrize("serve", [learner, rollout, reward])
async def test_a_service_lets_in_who_has_its_token_and_trusts_its_certificate_and_counts_the_others(
    serve: Any, tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    certificate, key = authority.sign("server", days=1)
    (tmp_path / "token").write_text(TOKEN)
    config = SecurityConfig(certificate=certificate, key=key, ca=authority.ca, token_file=tmp_path / "token")
    right = resolve(config)
    with caplog.at_level(logging.DEBUG):
        async with serve(config, tmp_path, tiny_model) as served:

            async def counted() -> int:
                async with rpc.channel(served.address, right) as channel:
                    return int(await served.ask(channel))

            assert await counted() == 0
            assert await refusal(served, rpc.Security(token="another", ca=authority.ca)) is grpc.StatusCode.UNAUTHENTICATED
            assert await refusal(served, rpc.Security(ca=authority.ca)) is grpc.StatusCode.UNAUTHENTICATED
            assert await counted() == 2
            assert await refusal(served, rpc.Security(token=TOKEN)) is grpc.StatusCode.UNAVAILABLE  # a plain client
            plain = await counted()
            assert plain > 2
            assert await refusal(served, rpc.Security(token=TOKEN, ca=stranger.ca)) is grpc.StatusCode.UNAVAILABLE
            untrusted = await counted()
            assert untrusted > plain
            authority.sign("server", days=-1)  # the files are replaced: the next connection gets the expired one
            assert await refusal(served, right) is grpc.StatusCode.UNAVAILABLE
            authority.sign("server", days=1)  # and renewed, without a restart
            assert await counted() > untrusted
    assert TOKEN not in caplog.text and TOKEN not in "".join(file.read_text() for file in (tmp_path / "run").rglob("*.json"))
