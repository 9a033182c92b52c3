"""A FeedService without a ledger: the same batches to whoever asks, cuts marked by a rename, every call remembered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from learner.trainer.samples import Sample
from learner.trainer.table import Entry
from protos import arrays, rpc
from protos.learner.v1alpha1 import feed_pb2 as pb
from protos.learner.v1alpha1 import feed_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2

Batches = Callable[[int], tuple[list[Entry], list[Sample]]]


def trajectory(sample: Sample, **changes: Any) -> trajectory_pb2.Trajectory:
    """The wire form of a sample."""
    message = trajectory_pb2.Trajectory(
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        prompt_ids=arrays.pack_ids(sample.prompt_ids),
        completion_ids=arrays.pack_ids(sample.completion_ids),
        logprobs=arrays.pack_floats(sample.behaviour),
        loss_mask=arrays.pack_mask(sample.loss_mask),
        text=sample.text,
    )
    for name, value in changes.items():
        getattr(message, name).CopyFrom(value)
    return message


def table_row(entry: Entry) -> pb.TableRow:
    names = ("group_id", "sample_index", "reward", "usable", "unusable_reason", "num_prompt_tokens", "num_completion_tokens")
    more = ("num_trained_tokens", "staleness", "owner", "truncated", "num_versions", "reward_parts")
    return pb.TableRow(**{name: getattr(entry, name) for name in names + more})


class FakeFeed(feed_pb2_grpc.FeedServiceServicer):
    """`batches(step)` gives table and samples; from `num_steps` on the run is over. `calls` holds (method, request) in order."""

    def __init__(self, batches: Batches, *, num_steps: int, cut_dir: str = "", policy_step: int = 0) -> None:
        self._batches, self._num_steps = batches, num_steps
        self.cut_dir, self.policy_step = cut_dir, policy_step
        self.calls: list[tuple[str, Any]] = []
        self.version = 0
        self.abort: tuple[grpc.StatusCode, str] | None = None  # what TakeBatch answers instead

    async def Register(self, request: Any, context: Any) -> pb.RegisterResponse:
        self.calls.append(("Register", request))
        return pb.RegisterResponse(run_id="test", cut_dir=self.cut_dir, policy_step=self.policy_step)

    async def TakeBatch(self, request: Any, context: Any) -> Any:
        self.calls.append(("TakeBatch", request))
        if self.abort is not None:
            await context.abort(*self.abort)
        if request.policy_step >= self._num_steps:
            yield pb.TakeBatchResponse(header=pb.BatchHeader(policy_step=request.policy_step, end_of_run=True))
            return
        table, samples = self._batches(request.policy_step)
        owned = {entry.id for entry in table if entry.owner == request.rank and entry.usable}
        mine = [trajectory(s) for s in samples if (s.group_id, s.sample_index) in owned]
        yield pb.TakeBatchResponse(header=pb.BatchHeader(policy_step=request.policy_step, table=map(table_row, table), num_rows=len(mine)))
        for message in mine:
            yield pb.TakeBatchResponse(row=message)

    async def CloseBatch(self, request: Any, context: Any) -> pb.CloseBatchResponse:
        self.calls.append(("CloseBatch", request))
        self.version += 1
        return pb.CloseBatchResponse(version=self.version, lineage=0)

    async def SaveCut(self, request: Any, context: Any) -> pb.SaveCutResponse:
        self.calls.append(("SaveCut", request))
        if request.error:
            return pb.SaveCutResponse()
        marked = Path(request.cut_dir).with_suffix("")
        Path(request.cut_dir).rename(marked)
        return pb.SaveCutResponse(cut_dir=str(marked))

    async def FinishRun(self, request: Any, context: Any) -> pb.FinishRunResponse:
        self.calls.append(("FinishRun", request))
        return pb.FinishRunResponse()

    async def BeginUpdate(self, request: Any, context: Any) -> pb.BeginUpdateResponse:
        return pb.BeginUpdateResponse(epoch=1)

    async def EndUpdate(self, request: Any, context: Any) -> pb.EndUpdateResponse:
        return pb.EndUpdateResponse()

    def named(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]


@contextmanager
def serving(feed: FakeFeed) -> Iterator[str]:
    """Its address, while it is served by a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> rpc.Server:
        server = rpc.Server("127.0.0.1:0", [lambda s: feed_pb2_grpc.add_FeedServiceServicer_to_server(feed, s)])
        await server.start()
        await server.ready()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.1), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
