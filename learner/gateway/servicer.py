"""LearnerService: decode, one call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from learner.gateway import wire
from learner.gateway.attendance import Attendance
from learner.gateway.evaluation_desk import EvaluationLoan
from learner.gateway.fetches import Fetches
from learner.gateway.leases import LeaseDesk, Loan
from learner.gateway.progress import Progress
from learner.gateway.refusals import answering
from learner.gateway.snapshots import Snapshots, patient
from learner.gateway.status import Status
from learner.gateway.submissions import Receipt, Submissions
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.learner.v1alpha1 import learner_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """What actors call."""

    def __init__(
        self, *, attendance: Attendance, desk: LeaseDesk, submissions: Submissions, progress: Progress, snapshots: Snapshots, fetches: Fetches, status: Status, encode: Callable[[Loan | EvaluationLoan], pb.Lease]
    ) -> None:
        self._attendance = attendance
        self._desk = desk
        self._submissions = submissions
        self._progress = progress
        self._snapshots = snapshots
        self._fetches = fetches
        self._status = status
        self._encode = encode

    @answering
    async def Attend(self, requests: AsyncIterator[pb.AttendRequest], context: Any) -> None:
        await self._attendance.attend(requests, context.write)

    @answering
    async def LeaseGroups(self, request: pb.LeaseGroupsRequest, context: Any) -> pb.LeaseGroupsResponse:
        loans = await self._desk.lease(request.replica_id, request.incarnation, max_groups=request.max_groups, wait_s=request.wait_s)
        return pb.LeaseGroupsResponse(leases=[self._encode(loan) for loan in loans])

    @answering
    async def ReportProgress(self, requests: AsyncIterator[pb.ReportProgressRequest], context: Any) -> None:
        await self._progress.serve(requests, context.write)

    @answering
    async def SubmitTrajectories(self, requests: AsyncIterator[pb.SubmitTrajectoriesRequest], context: Any) -> None:
        async def write(receipts: list[Receipt]) -> None:
            await context.write(wire.receipts(receipts))

        await self._submissions.serve(_messages(requests), write)

    @answering
    async def FetchWeights(self, request: pb.FetchWeightsRequest, context: Any) -> None:
        write = patient(context.write)
        if not await self._fetches.send_changes(request, write):
            await self._snapshots.send_newest(lambda part: write(wire.weights(part)))

    @answering
    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return self._status()


async def _messages(requests: AsyncIterator[pb.SubmitTrajectoriesRequest]) -> AsyncIterator[tuple[str, Sequence[trajectory_pb2.Trajectory]]]:
    async for request in requests:
        yield request.run_id, (request.trajectory,) if request.HasField("trajectory") else request.trajectories
