"""RewardService over loopback, with user code in processes of its own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.reward_server.conftest import MakeStub, request, serving, spec


async def sent(requests: Iterable[pb.ScoreRequest]) -> AsyncIterator[pb.ScoreRequest]:
    for each in requests:
        yield each


async def score(stub: RewardServiceStub, requests: Iterable[pb.ScoreRequest]) -> dict[str, pb.ScoreResponse]:
    """All answers of one stream, by id."""
    return {answer.id: answer async for answer in stub.Score(sent(requests), timeout=30)}


async def test_answers_carry_the_requests_ids_the_scorers_name_and_parts(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("behaves"), spec("last_number"))
    answers = await score(stub, [request("a", "parts"), request("b", "1 - 8 = -7", "last_number", answer=-7), request("c", "raise")])
    assert answers["a"].reward.score.value == 0.5 and dict(answers["a"].reward.score.parts) == {"format": 1.0, "answer": 0.25}
    assert answers["a"].reward.scorer == "behaves"
    assert answers["b"].reward.score.value == 1.0 and answers["b"].reward.scorer == "last_number"
    assert answers["c"].reward.unscored.reason == trajectory_pb2.UNSCORED_REASON_ERROR
    assert 0 < answers["a"].seconds < 5


async def test_an_unknown_scorer_and_a_missing_field_are_refused_answers_and_no_status(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("last_number"))
    answers = await score(stub, [request("a", "1", "judge"), request("b", "1"), request("c", "1", answer=1)])
    assert answers["a"].reward.unscored.reason == trajectory_pb2.UNSCORED_REASON_REFUSED
    assert "last_number" in answers["a"].reward.unscored.detail
    assert answers["b"].reward.unscored.reason == trajectory_pb2.UNSCORED_REASON_REFUSED
    assert answers["c"].reward.score.value == 1.0


async def test_answers_come_in_the_order_of_completion(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("waits", limit_s=5.0))
    order = [answer.id async for answer in stub.Score(sent(request(i, pause) for i, pause in enumerate(["0.6", "0.3", "0"])))]
    assert order == ["2", "1", "0"]


async def test_batches_are_answered_item_by_item(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("behaves"))

    async def batches() -> AsyncIterator[pb.ScoreBatchRequest]:
        yield pb.ScoreBatchRequest(requests=[request(number, number) for number in range(100)])
        yield pb.ScoreBatchRequest(requests=[request(number, number) for number in range(100, 130)])

    answers = [each async for message in stub.ScoreBatch(batches(), timeout=30) for each in message.responses]
    assert {int(each.id): each.reward.score.value for each in answers} == {number: float(number) for number in range(130)}


async def test_one_of_thirty_two_that_raises_or_sleeps_costs_its_own_score_only(make_stub: MakeStub) -> None:
    # faults.md 102, 106
    stub = await make_stub(spec("behaves", limit_s=2.0))
    for bad, reason in (("raise", trajectory_pb2.UNSCORED_REASON_ERROR), ("sleep", trajectory_pb2.UNSCORED_REASON_TIMEOUT)):
        answers = await score(stub, [request(number, bad if number == 7 else number) for number in range(32)])
        assert [answers[str(number)].reward.score.value for number in range(32) if number != 7] == [float(number) for number in range(32) if number != 7]
        assert answers["7"].reward.unscored.reason == reason
    (listed,) = (await stub.ListScorers(pb.ListScorersRequest())).scorers
    assert (listed.num_answered, dict(listed.num_unscored_by_reason)) == (64, {"error": 1, "timeout": 1})


async def test_sixteen_streams_with_a_sleeper_each_get_all_their_other_answers_before_it_ends(make_stub: MakeStub) -> None:
    # faults.md 102, 123: processes are spawned, beside gRPC's threads
    stub = await make_stub(spec("behaves", limit_s=6.0), spec("one"), max_slow=4)

    async def one_stream(stream: int) -> None:
        began_s = time.monotonic()
        requests = [request("bad", "sleep" if stream == 0 else "raise")] + [request(number, number, "one") for number in range(100)]
        async for answer in stub.Score(sent(requests), timeout=30):
            if answer.id != "bad":
                assert answer.reward.score.value == 1.0
                assert time.monotonic() - began_s < 5.5

    await asyncio.gather(*(one_stream(stream) for stream in range(16)))


async def test_health_answers_at_once_while_many_streams_are_open_and_scorers_spin() -> None:
    # faults.md 124
    async with serving(spec("behaves", limit_s=30.0), workers=2) as (address, _), rpc.channel(address) as channel:
        stub = RewardServiceStub(channel)
        streams = [stub.Score() for _ in range(32)]
        for stream in streams:
            await stream.write(request("a", "backtrack"))
        await asyncio.sleep(0.5)
        for _ in range(5):
            began_s = time.monotonic()
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert time.monotonic() - began_s < 10  # the scorers spin for 30
        for stream in streams:
            stream.cancel()


async def test_no_more_than_max_pending_items_of_a_stream_are_read() -> None:
    async with serving(spec("waits", limit_s=30.0), max_pending=4) as (address, servicer), rpc.channel(address) as channel:
        call = RewardServiceStub(channel).Score()
        for number in range(100):
            await call.write(request(number, "0.1"))
        await call.done_writing()
        num_answers = 0
        async for _ in call:
            num_answers += 1
            assert all(stream.num_pending <= 4 for stream in servicer._streams)
        assert num_answers == 100


async def test_a_caller_that_goes_stops_the_work(tmp_path: Path) -> None:
    async with serving(spec("slowly", limit_s=60.0)) as (address, servicer), rpc.channel(address) as channel:
        call = RewardServiceStub(channel).Score()
        for number in range(20):
            await call.write(request(number, "30", calls=str(tmp_path / "calls")))
        await asyncio.sleep(0.6)
        call.cancel()
        await asyncio.sleep(0.8)
        made = len((tmp_path / "calls").read_text())
        pool = servicer._plane._at_work.pool
        assert pool is not None and made < 20 and pool.accounts[0].num_slow + pool.accounts[0].num_busy == 0
        await asyncio.sleep(0.5)
        assert len((tmp_path / "calls").read_text()) == made and not servicer._streams


async def test_an_item_without_id_or_with_one_that_is_pending_is_invalid(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("waits"))
    for requests in ([request("")], [request("a", "0.5"), request("a", "0.5")]):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(stub, requests)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_draining_server_answers_what_it_has_read_and_then_says_unavailable() -> None:
    async with serving(spec("waits", limit_s=5.0)) as (address, servicer), rpc.channel(address) as channel:
        call = RewardServiceStub(channel).Score()
        for number in range(5):
            await call.write(request(number, "0.5"))
        await asyncio.sleep(0.2)
        servicer.drain()
        await call.write(request("too late", "0"))
        assert {(await call.read()).id for _ in range(5)} == {"0", "1", "2", "3", "4"}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_scorers_are_listed_with_limits_and_counts(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("behaves", limit_s=2.0), spec("one"))
    await score(stub, [request("a", "1"), request("b", "raise"), request("c", "1", "one")])
    listed = await stub.ListScorers(pb.ListScorersRequest())
    assert listed.default_scorer == "behaves"
    assert [(each.name, each.description, each.limit_s, each.num_answered, each.num_unscored) for each in listed.scorers] == [
        ("behaves", "Does what the completion says.", 2.0, 2, 1),
        ("one", "Always one.", 1.0, 1, 0),
    ]


async def test_the_service_itself_never_imports_user_code(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("one"), spec("exact"))
    assert (await score(stub, [request("a")]))["a"].reward.score.value == 1.0
    assert "user_functions" not in sys.modules
    # A built-in's module may be here because its own tests import it; the service asks for none of them.
