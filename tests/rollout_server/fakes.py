"""A learner's gateway and a reward server, just real enough to stand at the other end of a rollout server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from protos import rpc
from protos.arrays import pack_ids
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.learner.v1alpha1 import learner_pb2_grpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.checkpoint import folder_update

PROMPT = [65, 66, 67, 68]


def a_lease(number: int, *, group_size: int = 2, least_version: int = 1, max_new_tokens: int = 8, done: tuple[int, ...] = (), attempt: int = 1) -> pb.Lease:
    return pb.Lease(
        lease_id=f"l{number}.{attempt}", group_id=f"g{number}", seq=number, attempt=attempt, prompt_id=f"p{number}",
        prompt_ids=pack_ids(PROMPT), prompt_text="1 + 1", group_size=group_size, done=done, least_version=least_version, lapse_s=60,
        sampling=trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=100 + number),
    )  # fmt: skip


class FakeLearner(learner_pb2_grpc.LearnerServiceServicer):
    """Lends what `lend` was given, keeps what was submitted, publishes what `publish` was given."""

    def __init__(self) -> None:
        self.port = 0
        self.hellos: list[pb.Hello] = []
        self.heartbeats: list[pb.Heartbeat] = []
        self.reports: list[pb.UpdateReport] = []
        self.goodbyes = 0
        self.submitted: list[trajectory_pb2.Trajectory] = []
        self.run_ids: list[str] = []
        self.progress: list[pb.ReportProgressRequest] = []
        self.progress_status: Callable[[pb.ReportProgressRequest], pb.ProgressStatus] = lambda _: pb.PROGRESS_STATUS_ACCEPTED
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.receipts: Callable[[trajectory_pb2.Trajectory], pb.ReceiptStatus | None] = lambda _: pb.RECEIPT_STATUS_ACCEPTED
        self.over: Callable[[trajectory_pb2.Trajectory], bool] = lambda _: False
        self.changed = asyncio.Condition()
        self._leases: list[pb.Lease] = []
        self._orders: list[asyncio.Queue[pb.AttendResponse]] = []
        self._newest: tuple[int, Path] | None = None
        self._server: rpc.Server | None = None

    async def start(self) -> str:
        self._server = rpc.Server(f"127.0.0.1:{self.port}", [lambda s: learner_pb2_grpc.add_LearnerServiceServicer_to_server(self, s)])
        await self._server.start()
        self.port = self._server.port
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)
        self._orders.clear()

    async def lend(self, *leases: pb.Lease) -> None:
        async with self.changed:
            self._leases += leases
            self.changed.notify_all()

    def publish(self, version: int, folder: Path) -> None:
        self._newest = (version, folder)
        self.order(pb.AttendResponse(published=pb.Published(version=version)))

    def order(self, order: pb.AttendResponse) -> None:
        for queue in self._orders:
            queue.put_nowait(order)

    async def until(self, question: Callable[[], bool], limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(question)

    async def Attend(self, requests: AsyncIterator[pb.AttendRequest], context: Any) -> AsyncIterator[pb.AttendResponse]:
        if self.refusal is not None:
            await context.abort(*self.refusal)
        orders: asyncio.Queue[pb.AttendResponse] = asyncio.Queue()
        newest = self._newest[0] if self._newest else 0
        orders.put_nowait(pb.AttendResponse(welcome=pb.Welcome(run_id="run-1", newest_version=newest, heartbeat_s=0.05, silence_s=5, scorer="s")))
        self._orders.append(orders)
        reader = asyncio.create_task(self._read(requests, orders))
        try:
            while (order := await orders.get()).WhichOneof("message") is not None:
                yield order
        finally:
            reader.cancel()
            with contextlib.suppress(ValueError):
                self._orders.remove(orders)

    async def _read(self, requests: AsyncIterator[pb.AttendRequest], orders: asyncio.Queue[pb.AttendResponse]) -> None:
        async for request in requests:
            async with self.changed:
                match request.WhichOneof("message"):
                    case "hello":
                        self.hellos.append(request.hello)
                    case "heartbeat":
                        self.heartbeats.append(request.heartbeat)
                    case "update_report":
                        self.reports.append(request.update_report)
                    case "goodbye":
                        self.goodbyes += 1
                self.changed.notify_all()
        orders.put_nowait(pb.AttendResponse())  # the stream's end

    async def LeaseGroups(self, request: pb.LeaseGroupsRequest, context: Any) -> pb.LeaseGroupsResponse:
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: bool(self._leases), limit_s=min(request.wait_s, 0.5))
        taken, self._leases = self._leases[: request.max_groups], self._leases[request.max_groups :]
        return pb.LeaseGroupsResponse(leases=taken)

    async def ReportProgress(self, requests: Any, context: Any) -> AsyncIterator[pb.ReportProgressResponse]:
        async for request in requests:
            async with self.changed:
                self.progress.append(request)
                self.changed.notify_all()
            part, status = request.part, self.progress_status(request)
            taken = part.start + len(part.token_ids.data) // 4 if status == pb.PROGRESS_STATUS_ACCEPTED else part.start
            yield pb.ReportProgressResponse(group_id=request.group_id, sample_index=part.sample_index, status=status, num_tokens=taken)

    async def SubmitTrajectories(self, requests: Any, context: Any) -> AsyncIterator[pb.SubmitTrajectoriesResponse]:
        async for request in requests:
            for trajectory in request.trajectories or (request.trajectory,):
                async with self.changed:
                    self.submitted.append(trajectory)
                    self.run_ids.append(request.run_id)
                    self.changed.notify_all()
                status = self.receipts(trajectory)
                if status is not None:
                    yield pb.SubmitTrajectoriesResponse(group_id=trajectory.group_id, sample_index=trajectory.sample_index, status=status, group_is_over=self.over(trajectory))

    async def FetchWeights(self, request: pb.FetchWeightsRequest, context: Any) -> AsyncIterator[pb.FetchWeightsResponse]:
        if self._newest is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing is published yet")
        assert self._newest is not None
        manifest, chunks = folder_update(self._newest[1], self._newest[0])
        yield pb.FetchWeightsResponse(manifest=manifest)
        for bucket, offset, data in chunks:
            yield pb.FetchWeightsResponse(chunk=pb.FetchWeightsResponse.Chunk(bucket=bucket, offset=offset, data=data))


class FakeReward(reward_pb2_grpc.RewardServiceServicer):
    """Scores a completion by its length, or not at all while `silent`."""

    def __init__(self) -> None:
        self.port = 0
        self.silent = False
        self.requests: list[reward_pb2.ScoreRequest] = []
        self.groups: list[reward_pb2.ScoreGroupRequest] = []
        self._server: rpc.Server | None = None

    async def start(self) -> str:
        self._server = rpc.Server(f"127.0.0.1:{self.port}", [lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(self, s)])
        await self._server.start()
        self.port = self._server.port
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def ScoreGroup(self, request: reward_pb2.ScoreGroupRequest, context: Any) -> reward_pb2.ScoreGroupResponse:
        """Each sample by its place in the group."""
        self.groups.append(request)
        if self.silent:
            await asyncio.sleep(60)
        scores = [trajectory_pb2.Score(value=float(place)) for place in range(len(request.completions))]
        return reward_pb2.ScoreGroupResponse(rewards=[trajectory_pb2.Reward(score=each, scorer=request.scorer) for each in scores])

    async def Score(self, requests: Any, context: Any) -> AsyncIterator[reward_pb2.ScoreResponse]:
        async for request in requests:
            self.requests.append(request)
            if not self.silent:
                score = trajectory_pb2.Score(value=float(len(request.completion)))
                yield reward_pb2.ScoreResponse(id=request.id, reward=trajectory_pb2.Reward(score=score, scorer=request.scorer))
