"""Asking another reward server, or anything that serves `protos.reward.v1alpha1`: one stream of ScoreBatch a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from reward_server import wire
from reward_server.endpoints.failures import Failed, Kind
from reward_server.endpoints.waiting import Call
from reward_server.outcome import Outcome, Unscored

Code = grpc.StatusCode
# (kind, worth another attempt, speaks against the upstream's health); what is not named is the other side's defect: tried again.
_FAILURES: dict[grpc.StatusCode, tuple[Kind, bool, bool]] = {
    Code.UNAVAILABLE: ("unavailable", True, True),
    Code.DEADLINE_EXCEEDED: ("timeout", True, True),
    Code.RESOURCE_EXHAUSTED: ("overloaded", True, False),
    Code.ABORTED: ("error", True, False),
    Code.CANCELLED: ("unavailable", True, True),
    Code.UNAUTHENTICATED: ("refused", False, False),
    Code.PERMISSION_DENIED: ("refused", False, False),
    Code.INVALID_ARGUMENT: ("refused", False, False),
    Code.FAILED_PRECONDITION: ("refused", False, False),
    Code.NOT_FOUND: ("refused", False, False),
    Code.UNIMPLEMENTED: ("refused", False, False),
}


class GrpcDialect:
    """Example: `GrpcDialect(scorer="sums", security=rpc.OPEN)`; scorer empty: the other side's default."""

    def __init__(self, *, scorer: str, security: rpc.Security) -> None:
        self._scorer = scorer
        self._security = security
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, address: str, calls: Sequence[Call], limit_s: float) -> list[Outcome]:
        """See Dialect."""
        stream = RewardServiceStub(self._channel(address)).ScoreBatch(self._requests(calls), timeout=limit_s)
        answers: dict[str, Outcome] = {}
        try:
            async for message in stream:
                answers.update((each.id, wire.from_proto(each.reward)) for each in message.responses)
        except grpc.aio.AioRpcError as error:
            kind, is_retryable, is_ailing = _FAILURES.get(error.code(), ("error", True, True))
            raise Failed(kind, f"{address}: {error.code().name}: {error.details()}", is_retryable=is_retryable, is_ailing=is_ailing) from None
        finally:
            stream.cancel()  # does nothing once it has ended
        return [answers.get(str(place), Unscored(f"{address} answered other items and left this one out", "error")) for place in range(len(calls))]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address, self._security)
        return self._channels[address]

    async def _requests(self, calls: Sequence[Call]) -> AsyncIterator[pb.ScoreBatchRequest]:
        yield pb.ScoreBatchRequest(requests=[self._request(str(place), call) for place, call in enumerate(calls)])

    def _request(self, item_id: str, call: Call) -> pb.ScoreRequest:
        request = pb.ScoreRequest(id=item_id, scorer=self._scorer, prompt=call.prompt, completion=call.completion, priority=call.priority)
        request.fields.ParseFromString(call.fields)
        return request
