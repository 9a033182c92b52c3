"""Reports how far unfinished samples are, so that another replica draws on from there when this one is gone.

    run    consumes what the engine has drawn, produces reports, waits for a second,            unblocked by time
    begin  is told of a sample that is drawn or waits for its score; end: of one that is submitted or given up

A sample is reported whenever `every_tokens` more of it are drawn, and once it is finished but waits for its score. One report of a
sample is under way at a time. A report that fails is made again later: the learner says how much it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import xxhash

from protos import rpc
from protos.arrays import pack_floats, pack_ids
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.drawing import Drawing
from rollout_server.engine import Delta
from rollout_server.wire import FINISH, version_spans

logger = logging.getLogger("headrace.rollout.reporting")

LOOK_S = 1.0
MESSAGE_TOKENS = 1 << 18  # of one report
_TRANSIENT_S = 5.0  # after a failed call


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """Under which lease a sample is drawn now. Example: Fence(run_id="r1", lease_id="l7")"""

    run_id: str
    lease_id: str


@dataclass(kw_only=True, slots=True, eq=False)
class Watched:
    """A sample in hand."""

    group_id: str
    sample_index: int
    drawing: Drawing
    every_tokens: int
    fence: Callable[[], Fence]
    num_kept: int  # tokens that the learner has
    finish_kept: bool  # it knows that the sample is finished
    sent_finish: bool = False  # by the last report
    refused_lease: str = ""  # under which nothing more is to be reported
    finished_s: float | None = None  # monotonic seconds at which it was seen to be finished

    def is_due(self, *, all_of_it: bool) -> bool:
        if self.refused_lease == self.fence().lease_id:
            return False
        new, finished = self.drawing.num_tokens - self.num_kept, self.drawing.finish is not None and not self.finish_kept
        if all_of_it:
            return new > 0 or finished
        waits = finished and self.finished_s is not None and time.monotonic() - self.finished_s >= LOOK_S / 2
        return waits or new >= self.every_tokens


class Reporting:
    """`drawn`: as Engine.drawn, of the engine that draws the watched samples."""

    def __init__(self, stub: Any, drawn: Callable[[str, int], Delta | None]) -> None:
        self._stub = stub
        self._drawn = drawn
        self._watched: set[Watched] = set()
        self._calling = asyncio.Lock()
        self._unknown = False  # the learner has no such method

    def begin(self, *, group_id: str, sample_index: int, drawing: Drawing, every_tokens: int, fence: Callable[[], Fence]) -> Watched:
        """Watches a sample; what its drawing begins with came from the learner. every_tokens 0: it is never reported."""
        watched = Watched(
            group_id=group_id, sample_index=sample_index, drawing=drawing, every_tokens=every_tokens, fence=fence,
            num_kept=drawing.num_tokens, finish_kept=drawing.finish is not None,
        )  # fmt: skip
        if every_tokens:
            self._watched.add(watched)
        return watched

    def end(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def look(self, watched: Watched) -> None:
        """Brings the drawing up to what the engine has drawn."""
        drawing = watched.drawing
        if drawing.request_id and (new := self._drawn(drawing.request_id, drawing.num_of_request)) is not None:
            drawing.grow(new)
        if drawing.finish is not None and watched.finished_s is None:
            watched.finished_s = time.monotonic()

    async def hand_back(self, watched: Watched) -> None:
        """Reports all that is known of a sample that will not be drawn on here."""
        if watched not in self._watched:
            return
        self._watched.discard(watched)
        async with self._calling:
            if watched.is_due(all_of_it=True):
                await self._report([watched])

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for watched in self._watched:
                self.look(watched)
            async with self._calling:
                due = [watched for watched in self._watched if watched.is_due(all_of_it=False)]
                taken = not due or await self._report(due)
            if not taken:
                await asyncio.sleep(_TRANSIENT_S)

    async def _report(self, due: list[Watched]) -> bool:
        """One call. False: it failed, and what was not answered is reported again later."""
        if self._unknown:
            return True
        call = self._stub.ReportProgress(timeout=rpc.deadline_s("ReportProgress"))
        try:
            for watched in due:
                await call.write(_request(watched))
            await call.done_writing()
            for watched in due:
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    break
                _note(watched, answer)
            code, details = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.InvalidStateError:  # a write on a call that has ended
            code, details = await call.code(), await call.details()
        finally:
            call.cancel()
        if code == grpc.StatusCode.OK:
            return True
        self._unknown = code == grpc.StatusCode.UNIMPLEMENTED
        logger.log(logging.INFO if code == grpc.StatusCode.UNAVAILABLE else logging.WARNING, "progress was not taken: %s %s", code.name, details)
        return False


def _request(watched: Watched) -> pb.ReportProgressRequest:
    drawing, start, fence = watched.drawing, watched.num_kept, watched.fence()
    end = min(drawing.num_tokens, start + MESSAGE_TOKENS)
    spans = [span for span in drawing.spans if span.start < end]
    part = pb.PartialSample(
        sample_index=watched.sample_index, start=start, token_ids=pack_ids(drawing.token_ids[start:end]), logprobs=pack_floats(drawing.logprobs[start:end]), spans=version_spans(spans),
        finish_reason=FINISH[drawing.finish] if drawing.finish and end == drawing.num_tokens else trajectory_pb2.FINISH_REASON_UNSPECIFIED,
    )  # fmt: skip
    watched.sent_finish = bool(part.finish_reason)
    if part.spans:
        part.spans[-1].end = end
    before = xxhash.xxh3_64_intdigest(pack_ids(drawing.token_ids[:start]).data)
    return pb.ReportProgressRequest(run_id=fence.run_id, lease_id=fence.lease_id, group_id=watched.group_id, part=part, digest_before=before)


def _note(watched: Watched, answer: pb.ReportProgressResponse) -> None:
    """What the learner has of the sample now."""
    match answer.status:
        case pb.PROGRESS_STATUS_ACCEPTED:
            watched.num_kept = answer.num_tokens
            watched.finish_kept = watched.sent_finish
        case pb.PROGRESS_STATUS_ELSEWHERE if answer.num_tokens <= watched.drawing.num_tokens:
            watched.num_kept = answer.num_tokens
        case pb.PROGRESS_STATUS_FULL:
            return
        case _:
            watched.refused_lease = watched.fence().lease_id
