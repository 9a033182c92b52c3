"""Another reward server as a scorer: our own contract on the other side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from reward_server.outcome import Scored, Unscored
from tests.reward_server.conftest import serving, spec
from tests.reward_server.endpoints.conftest import plane_of, score


def far(address: str, scorer: str = "", **more: Any) -> dict[str, Any]:
    return {"name": "far", "limit_s": 5, "grpc": {"addresses": [address], "scorer": scorer, **more}}


async def test_scores_parts_and_reasons_come_through_another_server() -> None:
    async with serving(spec("behaves"), spec("last_number")) as (address, _), plane_of(far(address), {**far(address, "last_number"), "name": "sums"}) as plane:
        outcomes = await asyncio.gather(*(score(plane, each) for each in ("0.5", "parts", "raise", "nan", "unscored")))
        assert outcomes == [
            Scored(value=0.5),
            Scored(value=0.5, parts={"format": 1.0, "answer": 0.25}),
            Unscored("KeyError: 'no such thing'", "error"),
            Unscored("the score is nan, not a finite number", "non_finite"),
            Unscored("no gold answer", "refused"),
        ]
        assert await score(plane, "6 + 5 = 11", name="sums", answer=11) == Scored(value=1.0)


async def test_a_caller_that_goes_stops_the_work_on_the_far_side(tmp_path: Path) -> None:
    # faults.md 126, through two servers
    async with serving(spec("slowly", limit_s=60.0)) as (address, servicer), plane_of(far(address)) as plane:
        waiting = [asyncio.ensure_future(score(plane, "30", owner="gone", calls=str(tmp_path / "calls"))) for _ in range(3)]
        pool = servicer._plane._at_work.pool
        assert pool is not None
        await _until(lambda: pool.accounts[0].num_busy + pool.accounts[0].num_slow > 0)
        plane.forget("gone")
        await _until(lambda: pool.accounts[0].num_busy + pool.accounts[0].num_slow == 0)
        for each in waiting:
            each.cancel()


class Trickle(reward_pb2_grpc.RewardServiceServicer):
    """Answers something nobody asked for, again and again."""

    def __init__(self) -> None:
        self.num_ended = 0

    async def ScoreBatch(self, request_iterator: Any, context: Any) -> Any:
        try:
            while True:
                yield reward_pb2.ScoreBatchResponse(responses=[reward_pb2.ScoreResponse(id="another")])
                await asyncio.sleep(0.05)
        finally:
            self.num_ended += 1


async def test_a_server_that_trickles_for_ever_is_cut_at_the_wall_clock() -> None:
    # faults.md 127, 126
    trickle = Trickle()
    server = rpc.Server("127.0.0.1:0", [lambda grpc_server: reward_pb2_grpc.add_RewardServiceServicer_to_server(trickle, grpc_server)])
    await server.start()
    try:
        async with plane_of({**far(f"127.0.0.1:{server.port}", attempt_s=0.6), "limit_s": 0.6}) as plane:
            began_s = asyncio.get_running_loop().time()
            outcome = await score(plane, "1")
            assert isinstance(outcome, Unscored) and outcome.reason == "timeout" and 0.55 < asyncio.get_running_loop().time() - began_s < 20
            await _until(lambda: trickle.num_ended >= 1)
    finally:
        await server.stop(0.0)


async def test_nobody_there_is_unavailable() -> None:
    async with plane_of(far("127.0.0.1:9", retries=1)) as plane:
        outcome = await score(plane, "1")
    assert isinstance(outcome, Unscored) and outcome.reason == "unavailable" and "127.0.0.1:9" in outcome.detail


async def _until(holds: Any) -> None:
    end_s = asyncio.get_running_loop().time() + 20
    while not holds():
        assert asyncio.get_running_loop().time() < end_s
        await asyncio.sleep(0.02)
