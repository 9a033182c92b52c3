"""A pool and a served RewardService over scorers of user_functions.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub, add_RewardServiceServicer_to_server
from reward_server.accounts import Limits, ScorerSpec
from reward_server.outcome import Outcome
from reward_server.plane import Plane
from reward_server.pool import Pool
from reward_server.pooled import ProcessScorer
from reward_server.scorers_at_work import ScorersAtWork
from reward_server.servicer import RewardServicer

FOLDER = Path(__file__).parent


def spec(use: str, limit_s: float = 1.0, **args: Any) -> ScorerSpec:
    """A scorer named as its function."""
    return ScorerSpec(name=use.rpartition(":")[2], use=f"user_functions:{use}" if use in _USER else use, args=args, limit_s=limit_s)


_USER = {"one", "behaves", "tells_length", "weighted", "slowly", "waits", "blocks", "judge"}


def struct(fields: dict[str, Any]) -> bytes:
    """A record's fields as they travel."""
    made = Struct()
    made.update(fields)
    return made.SerializeToString()


class Calls:
    """A pool under test: `await calls.all(0, ["1", "sleep"])` gives the outcomes in order."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def submit(self, scorer: int, completion: str, fields: dict[str, Any] | None = None, owner: Any = "owner") -> asyncio.Future[Outcome]:
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.pool.submit(scorer=scorer, owner=owner, prompt="", completion=completion, fields=struct(fields or {}), answer=answered.set_result)
        return answered

    async def all(self, scorer: int, completions: Iterable[str], fields: dict[str, Any] | None = None) -> list[Outcome]:
        return await asyncio.gather(*(self.submit(scorer, each, fields) for each in completions))


MakeCalls = Callable[..., Awaitable[Calls]]
MakeStub = Callable[..., Awaitable[RewardServiceStub]]


@pytest.fixture
async def make_calls() -> AsyncIterator[MakeCalls]:
    """make_calls(spec(...), ..., workers=1): a started pool."""
    pools: list[Pool] = []

    async def make(*specs: ScorerSpec, folder: Path = FOLDER, **limits: Any) -> Calls:
        pools.append(Pool(specs, Limits(**limits), folder=folder))
        await pools[-1].start()
        return Calls(pools[-1])

    yield make
    for pool in pools:
        await pool.stop()


@asynccontextmanager
async def serving(*specs: ScorerSpec, max_pending: int = 4096, **limits: Any) -> AsyncIterator[tuple[str, RewardServicer]]:
    """A served pool: its address and its servicer."""
    pool = Pool(specs, Limits(**limits), folder=FOLDER)
    scorers = {each.name: ProcessScorer(pool=pool, index=index) for index, each in enumerate(specs)}
    plane = Plane(ScorersAtWork(scorers, pool=pool, endpoints=()), default=specs[0].name)
    servicer = RewardServicer(plane, max_pending=max_pending, max_pending_bytes=1 << 28)
    server = rpc.Server("127.0.0.1:0", [lambda grpc_server: add_RewardServiceServicer_to_server(servicer, grpc_server)])
    await plane.start()
    await server.start()
    await server.ready()
    try:
        yield f"127.0.0.1:{server.port}", servicer
    finally:
        await server.stop(0.0)
        await plane.stop()


@pytest.fixture
async def make_stub() -> AsyncIterator[MakeStub]:
    """make_stub(spec(...), ...): a client of a served pool."""
    async with AsyncExitStack() as stack:

        async def make(*specs: ScorerSpec, **settings: Any) -> RewardServiceStub:
            address, _ = await stack.enter_async_context(serving(*specs, **settings))
            return RewardServiceStub(await stack.enter_async_context(rpc.channel(address)))

        yield make


def request(item_id: object, completion: object = "1", scorer: str = "", **fields: Any) -> pb.ScoreRequest:
    made = pb.ScoreRequest(id=str(item_id), scorer=scorer, prompt="p", completion=str(completion))
    made.fields.update(fields)
    return made
