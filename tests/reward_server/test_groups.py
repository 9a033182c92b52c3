"""Scorers of whole groups: ranks and tournaments by hand, functions of yours, and the call that reaches them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub, add_RewardServiceServicer_to_server
from reward_server import grouping
from reward_server.config import RewardConfig
from reward_server.outcome import Outcome, Scored, Unscored, checked_group
from reward_server.plane import Plane
from reward_server.scorer import Group
from reward_server.servicer import RewardServicer
from tests.reward_server.conftest import struct
from tests.reward_server.endpoints.conftest import plane_of, score

BROKEN = Unscored("broken", "error")


def scored(*values: float | None) -> list[Outcome]:
    return [BROKEN if value is None else Scored(value=value) for value in values]


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ((3, 9, 3), [0.25, 1.0, 0.25]),  # ranks 0.5, 2, 0.5 of 2
        ((1, 2, 3, 4, 5), [0.0, 0.25, 0.5, 0.75, 1.0]),
        ((7, 7), [0.5, 0.5]),
        ((7,), [0.5]),
        ((1, None, 2), [0.0, None, 1.0]),
    ],
)
def test_a_rank_is_a_share_of_the_way_up_and_equal_ones_share_theirs(values: tuple[float | None, ...], ranks: list[float | None]) -> None:
    assert [outcome.value if isinstance(outcome, Scored) else None for outcome in grouping.ranked(scored(*values))] == ranks


def test_in_a_ring_everybody_meets_equally_many() -> None:
    assert grouping.pairs(5, 2) == [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    assert len(grouping.pairs(5, 0)) == len(grouping.pairs(5, 4)) == 10 and grouping.pairs(1, 0) == []
    for size, opponents in ((8, 4), (7, 2), (16, 6), (6, 4)):
        met = [place for pair in grouping.pairs(size, opponents) for place in pair]
        assert {met.count(place) for place in range(size)} == {opponents}


def test_a_win_share_is_the_mean_of_the_games_that_could_be_judged() -> None:
    games = dict(zip([(0, 1), (0, 2), (1, 2)], scored(1.0, 0.5, 0.0), strict=True))
    # 0: 1, 1/2 -> 3/4; 1: 0, 0 -> 0; 2: 1/2, 1 -> 3/4
    assert [outcome.value for outcome in grouping.win_shares(3, games) if isinstance(outcome, Scored)] == [0.75, 0.0, 0.75]
    lost = dict(zip([(0, 1), (0, 2), (1, 2)], scored(None, None, 1.0), strict=True))
    shares = grouping.win_shares(3, lost)  # 0 has no game left, the others have one of two
    assert isinstance(shares[0], Unscored) and shares[0].reason == "error" and shares[1] == Scored(value=1.0, parts={"num_games": 1.0, "num_lost_games": 1.0})
    assert grouping.win_shares(1, {}) == (Scored(value=0.5, parts={"num_games": 0.0, "num_lost_games": 0.0}),)


def test_both_orders_take_the_liking_for_a_place_out() -> None:
    assert grouping.game(*scored(1.0, 1.0)) == Scored(value=0.5)  # it always likes the first: nothing is known
    assert grouping.game(*scored(1.0, 0.0)) == Scored(value=1.0)
    assert grouping.game(Scored(value=0.7), None) == Scored(value=0.7)
    assert grouping.game(*scored(None, 1.0)) == BROKEN == grouping.game(*scored(1.0, None))
    assert isinstance(grouping.game(*scored(2.0, 0.0)), Unscored)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1, (0.5, {"a": 1})], (Scored(value=1.0), Scored(value=0.5, parts={"a": 1.0}))),
        ([1, Unscored("no gold")], (Scored(value=1.0), Unscored("no gold"))),
        (Unscored("none of them"), Unscored("none of them")),
    ],
)
def test_what_a_function_of_groups_returns_is_checked_sample_by_sample(result: Any, expected: Any) -> None:
    assert checked_group(result, 2) == expected


@pytest.mark.parametrize(("result", "reason"), [([1], "error"), ([1, 2, 3], "error"), ("12", "non_finite"), (None, "non_finite"), ({"a": 1, "b": 2}, "non_finite"), (iter(int, 1), "error")])
def test_a_result_that_is_no_list_of_the_right_length_is_unscored(result: Any, reason: str) -> None:
    outcome = checked_group(result, 2)
    assert isinstance(outcome, Unscored) and outcome.reason == reason


async def of_group(plane: Plane, name: str, *completions: str, **fields: Any) -> tuple[Outcome, ...]:
    answered: asyncio.Future[tuple[Outcome, ...]] = asyncio.get_running_loop().create_future()
    plane.submit_group(name, Group(owner="o", prompt="p", completions=completions, fields=struct(fields)), answered.set_result)
    return await asyncio.wait_for(answered, 20)


LENGTH = {"name": "length", "use": "length", "args": {"most": 4, "slack": 4}}


def values(outcomes: tuple[Outcome, ...]) -> list[Any]:
    return [outcome.value if isinstance(outcome, Scored) else outcome.reason for outcome in outcomes]


async def test_functions_ranks_tournaments_and_plain_scorers_all_answer_for_a_group() -> None:
    sections: list[dict[str, Any]] = [
        LENGTH,
        {"name": "mine", "use": "user_functions:longest", "whole_group": True, "limit_s": 1},
        {"name": "rank", "group": {"op": "rank", "of": "length"}},
        {"name": "longer", "use": "user_functions:is_longer"},
        {"name": "tournament", "group": {"op": "tournament", "of": "longer"}},
    ]
    async with plane_of(*sections) as plane:
        assert values(await of_group(plane, "length", "ab", "abcdef", "abcdefgh")) == [1.0, 0.5, 0.0]  # most 4, slack 4: 2 over, 4 over
        assert values(await of_group(plane, "mine", "a", "abc", "ab")) == [0.0, 1.0, 0.0]
        assert values(await of_group(plane, "rank", "ab", "abcdef", "abcdefgh")) == [1.0, 0.5, 0.0]
        # wins by length: aaa beats both, aa beats a; the same text again is a draw
        assert values(await of_group(plane, "tournament", "a", "aaa", "aa")) == [0.0, 1.0, 0.5]
        assert values(await of_group(plane, "tournament", "a", "a")) == [0.5, 0.5]
        for bad, reason in (("sleep", "timeout"), ("few", "error"), ("exit", "error"), ("text", "non_finite")):
            assert values(await of_group(plane, "mine", bad, "x")) == [reason, reason]
        assert values(await of_group(plane, "nobody", "a", "b")) == ["refused", "refused"]
        single = await score(plane, "a", name="rank")
        assert isinstance(single, Unscored) and single.reason == "refused" and "ScoreGroup" in single.detail
        assert plane.tallies["tournament"].num_answered == 5 and plane.tallies["mine"].unscored == {"timeout": 2, "error": 4, "non_finite": 2}


async def test_a_group_is_asked_for_over_the_wire_and_its_end_is_told() -> None:
    async with plane_of({"name": "mine", "use": "user_functions:longest", "whole_group": True, "limit_s": 30}) as plane:
        servicer = RewardServicer(plane, max_pending=64, max_pending_bytes=1 << 20)
        server = rpc.Server("127.0.0.1:0", [lambda grpc_server: add_RewardServiceServicer_to_server(servicer, grpc_server)])
        await server.start()
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            stub = RewardServiceStub(channel)
            answer = await stub.ScoreGroup(pb.ScoreGroupRequest(completions=["a", "bb"]), timeout=20)
            assert [(each.score.value, each.scorer) for each in answer.rewards] == [(0.0, "mine"), (1.0, "mine")]
            assert (await stub.ListScorers(pb.ListScorersRequest(), timeout=30)).scorers[0].compares
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await stub.ScoreGroup(pb.ScoreGroupRequest(), timeout=30)
            assert told.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await stub.ScoreGroup(pb.ScoreGroupRequest(completions=["sleep"]), timeout=0.3)
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            servicer.drain()
            with pytest.raises(grpc.aio.AioRpcError) as stopping:
                await stub.ScoreGroup(pb.ScoreGroupRequest(completions=["a"]), timeout=30)
            assert stopping.value.code() == grpc.StatusCode.UNAVAILABLE
        await server.stop(0)


async def test_groups_beyond_max_pending_wait_for_room() -> None:
    async with plane_of({"name": "mine", "use": "user_functions:longest", "whole_group": True, "limit_s": 0.6}, workers=2) as plane:
        servicer = RewardServicer(plane, max_pending=2, max_pending_bytes=1 << 20)
        server = rpc.Server("127.0.0.1:0", [lambda grpc_server: add_RewardServiceServicer_to_server(servicer, grpc_server)])
        await server.start()
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            stub = RewardServiceStub(channel)
            ends: list[str] = []

            async def ask(*completions: str) -> None:
                await stub.ScoreGroup(pb.ScoreGroupRequest(completions=completions), timeout=20)
                ends.append(completions[0])

            first = asyncio.create_task(ask("sleep", "x"))  # holds the room until its limit
            await asyncio.sleep(0.2)
            await asyncio.gather(first, ask("a"))
        await server.stop(0)
    assert ends == ["sleep", "a"]


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([LENGTH, {"name": "g", "group": {"op": "rank", "of": "nobody"}}], "scorer 'g' asks 'nobody', which is none of the scorers"),
    ([LENGTH, {"name": "g", "group": {"op": "rank", "of": "g"}}], "asks 'g', which compares whole groups"),
    ([LENGTH, {"name": "g", "group": {"op": "rank", "of": "length"}}, {"name": "s", "combine": {"op": "sum", "of": {"g": 1}}}], "scorer 's' asks 'g', which compares whole groups"),
    ([LENGTH, {"name": "g", "group": {"op": "tournament", "of": "length", "opponents": 3}}], "opponents=3 must be even"),
    ([{**LENGTH, "whole_group": True}], "whole_group belongs to functions of yours"),
]


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_a_bad_configuration_of_groups_is_refused(sections: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardConfig.model_validate({"scorers": sections})
