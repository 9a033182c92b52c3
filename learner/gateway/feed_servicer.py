"""FeedService: decode, one call, encode."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc

from learner.gateway import wire
from learner.gateway.feed import Feed
from learner.gateway.refusals import answering
from learner.gateway.updates import Key
from protos.learner.v1alpha1 import feed_pb2 as pb
from protos.learner.v1alpha1 import feed_pb2_grpc


class FeedServicer(feed_pb2_grpc.FeedServiceServicer):
    """What trainer ranks call."""

    def __init__(self, feed: Feed, run_id: str) -> None:
        self._feed = feed
        self._run_id = run_id

    @answering
    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        post = await self._feed.register(request.incarnation, request.rank, request.world_size)
        return pb.RegisterResponse(run_id=self._run_id, cut_dir=post.cut_dir, policy_step=post.policy_step, lineage=post.lineage)

    @answering
    async def TakeBatch(self, request: pb.TakeBatchRequest, context: Any) -> None:
        decision = await self._feed.take(request.incarnation, request.rank, request.policy_step, leaving=request.leaving)
        keys = decision.rows_of(request.rank)
        async with aclosing(self._feed.read_rows(keys, request.rows_bytes)) as chunks:  # read beside the making of the header
            await context.write(wire.header(decision, len(keys)))
            async for payloads in chunks:
                for message in wire.batch_rows(payloads, together=request.rows_bytes > 0):
                    await context.write(message)

    @answering
    async def CloseBatch(self, request: pb.CloseBatchRequest, context: Any) -> pb.CloseBatchResponse:
        folder, mismatch = Path(request.snapshot_dir), request.mismatch if request.HasField("mismatch") else None
        publication = await self._feed.close(request.incarnation, request.policy_step, snapshot_dir=folder, will_save=request.will_save, mismatch=mismatch)
        return pb.CloseBatchResponse(version=publication.version, lineage=publication.lineage)

    @answering
    async def BeginUpdate(self, request: pb.BeginUpdateRequest, context: Any) -> pb.BeginUpdateResponse:
        self._feed.duty.check(request.incarnation, request.rank)
        key = Key(incarnation=request.incarnation, version=request.version, attempt=request.attempt)
        store = (request.store_host, request.store_port)
        return wire.settlement(await self._feed.updates.begin(key, request.rank, store, num_ranks=self._feed.duty.world_size, device=request.device_uuid))

    @answering
    async def EndUpdate(self, request: pb.EndUpdateRequest, context: Any) -> pb.EndUpdateResponse:
        self._feed.duty.check(request.incarnation, request.rank)
        return wire.finish(await self._feed.updates.end(request.epoch, request.rank, ok=request.ok, error=request.error, sent=wire.sent(request)))

    @answering
    async def SaveCut(self, request: pb.SaveCutRequest, context: Any) -> pb.SaveCutResponse:
        folder = await self._feed.save(request.incarnation, request.policy_step, source=Path(request.cut_dir), error=request.error)
        return pb.SaveCutResponse(cut_dir=str(folder or ""))

    @answering
    async def FinishRun(self, request: pb.FinishRunRequest, context: Any) -> pb.FinishRunResponse:
        self._feed.finish(request.incarnation, request.error)
        return pb.FinishRunResponse()


def add_to_server(servicer: FeedServicer, server: Any) -> None:
    """As the generated function does, except that TakeBatch may send messages that are encoded already."""
    feed_pb2_grpc.add_FeedServiceServicer_to_server(servicer, server)
    handler = grpc.unary_stream_rpc_method_handler(servicer.TakeBatch, request_deserializer=pb.TakeBatchRequest.FromString, response_serializer=wire.encoded)
    server.add_registered_method_handlers(pb.DESCRIPTOR.services_by_name["FeedService"].full_name, {"TakeBatch": handler})
