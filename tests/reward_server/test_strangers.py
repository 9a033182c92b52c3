"""What a plain gRPC client may ask of Score by mistake, or in bulk: each has its answer, and the next call is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import grpc
import pytest

from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.reward_server.conftest import MakeStub, request, spec


async def sent(requests: Iterable[pb.ScoreRequest]) -> AsyncIterator[pb.ScoreRequest]:
    for each in requests:
        yield each


async def score(stub: RewardServiceStub, *requests: pb.ScoreRequest) -> dict[str, pb.ScoreResponse]:
    return {answer.id: answer async for answer in stub.Score(sent(requests), timeout=30)}


@pytest.mark.parametrize(
    ("requests", "words"),
    [([request("", "1", answer=1)], "an item has no id"), ([request("a", "1", answer=1), request("a", "1", answer=1)], "'a' is pending already")],
)
async def test_an_item_that_no_answer_could_be_matched_with_ends_its_call_alone(make_stub: MakeStub, requests: list[pb.ScoreRequest], words: str) -> None:
    stub = await make_stub(spec("last_number"))
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await score(stub, *requests)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await score(stub, request("a", "1", answer=1)))["a"].reward.score.value == 1.0


async def test_ten_megabytes_of_text_are_scored(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("last_number", limit_s=20.0))
    answers = await score(stub, request("a", "so " * 3_500_000 + "7", answer=7), request("b", "7", answer=7))
    assert [answers[name].reward.score.value for name in "ab"] == [1.0, 1.0], answers["a"].reward


async def test_an_unknown_scorer_is_a_refused_answer_that_names_those_there_are(make_stub: MakeStub) -> None:
    stub = await make_stub(spec("last_number"))
    unscored = (await score(stub, request("a", "1", "nobody")))["a"].reward.unscored
    assert unscored.reason == trajectory_pb2.UNSCORED_REASON_REFUSED and unscored.detail == "no scorer 'nobody' here; there are last_number"
