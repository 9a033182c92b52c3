"""A trained policy becomes a version: snapshot by all ranks, closing by rank 0, push in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from learner.trainer.feed import Feed
from learner.weights.announce import Probe
from learner.weights.push import Pusher
from learner.weights.snapshot import Snapshot, SnapshotWriter
from protos import faultpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version that replicas can fetch. Example: Published(version=7, lineage=0, policy_step=6, snapshot=Snapshot(...))"""

    version: int
    lineage: int
    policy_step: int
    snapshot: Snapshot


class Publisher:
    """Publishes policies, one after another. Example: `published = publisher.publish(3, will_save=False)`"""

    def __init__(self, *, feed: Feed, writer: SnapshotWriter, pusher: Pusher, probe: Callable[[], Probe] | None = None) -> None:
        """probe: computed of every version before it is written, and sent with it."""
        self._feed, self._writer, self.pusher, self._probe = feed, writer, pusher, probe

    def publish(self, policy_step: int, *, will_save: bool, mismatch: float | None = None) -> Published:
        """Collective; the weights may change as soon as it returns. The push goes on in the background. mismatch: see Feed.close_batch."""
        snapshot = self._writer.write(policy_step, probe=self._probe() if self._probe else None)
        faultpoints.point("trainer_snapshot")
        numbers = torch.zeros(2, dtype=torch.int64)
        if dist.get_rank() == 0:
            numbers = torch.tensor(self._feed.close_batch(policy_step, snapshot_dir=str(snapshot.folder), will_save=will_save, mismatch=mismatch))
        dist.broadcast(numbers, src=0)
        version, lineage = numbers.tolist()
        faultpoints.point("trainer_published")
        self.pusher.submit(version, snapshot)
        return Published(version=version, lineage=lineage, policy_step=policy_step, snapshot=snapshot)
