"""FetchWeights: the newest version as peers that have it, as a delta, or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from learner.gateway.attendance import Attendance
from learner.gateway.deltas import Deltas
from learner.gateway.snapshots import Snapshots
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.weights.history import plan_of

MAX_PEERS = 3  # named to one caller


class Fetches:
    """Example: `await fetches.send_changes(request, context.write)` is False where the caller must get the whole version."""

    def __init__(self, snapshots: Snapshots, deltas: Deltas, attendance: Attendance) -> None:
        self._snapshots = snapshots
        self._deltas = deltas
        self._attendance = attendance
        self._turn = 0

    async def send_changes(self, request: pb.FetchWeightsRequest, write: Callable[[pb.FetchWeightsResponse], Awaitable[None]]) -> bool:
        """Peers or a delta, where there are any."""
        peers = self._peers() if request.peers else []
        if peers:
            await write(pb.FetchWeightsResponse(peers=pb.Peers(addresses=peers)))
            return True
        manifest, steps = await self._deltas.chain(have_version=request.have_version, have_layout=request.have_layout)
        if manifest is None:
            return False
        await write(pb.FetchWeightsResponse(manifest=manifest))
        await write(pb.FetchWeightsResponse(delta_plan=plan_of(steps)))
        for part in (part for step in steps for part in step.parts):
            await write(pb.FetchWeightsResponse(delta_part=part))
        return True

    def _peers(self) -> list[str]:
        """Addresses of replicas that sample from the newest version and give it away, others first each time."""
        newest = self._snapshots.newest
        having = [r.claim.address for r in self._attendance.attending() if newest and r.claim.serves_weights and r.loaded_version == newest.version and r.claim.address]
        self._turn += 1
        return [having[(self._turn + i) % len(having)] for i in range(min(MAX_PEERS, len(having)))]
