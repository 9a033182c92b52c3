"""A policy version on shared memory: every rank writes its own shards, no rank ever holds the whole model.

    writer = SnapshotWriter(model, root=snapshot_root(run_id), incarnation=ns, served_dtype="bfloat16", bucket_bytes=512 << 20)
    snapshot = writer.write(policy_step=k)          # every rank; afterwards the optimizer may touch the weights
    # rank 0: CloseBatch(snapshot_dir=str(snapshot.folder)); every rank: pusher.submit(version, snapshot)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn


def snapshot_root(run_id: str) -> Path:
    """Folder of a run's snapshots on this node: `/dev/shm/headrace-<run_id>`."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A finished snapshot, the same on all ranks but for the rank's own counts.

    Example: Snapshot(folder=Path("/dev/shm/headrace-r1/17-3"), policy_step=3, rank=0, num_bytes=1024, total_bytes=2048, seconds=0.01)
    """

    folder: Path  # holds rank-R.bin of every rank and manifest.bin
    policy_step: int
    rank: int
    num_bytes: int  # written by this rank
    total_bytes: int  # of the version
    seconds: float


class SnapshotWriter:
    """Writes versions of one FSDP2 (or plain) model. Made after `fully_shard`; the plan is fixed then.

    `group`: the trainer's process group (None: the default group where it is initialised, else a single rank).
    Raises ValueError naming the tensor for a sharding it does not know, and for an unknown served dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        root: Path,
        incarnation: int,
        served_dtype: str,
        bucket_bytes: int,
        group: dist.ProcessGroup | None = None,
        keep: int = 2,
    ) -> None:
        raise NotImplementedError

    def write(self, policy_step: int) -> Snapshot:
        """Collective over all ranks; complete on every rank when it returns. Rank 0 writes manifest.bin last and removes
        all but the newest `keep` snapshots. Raises OSError when shared memory is full."""
        raise NotImplementedError

    def close(self) -> None:
        """Rank 0 removes the run's snapshots (open files stay readable)."""
        raise NotImplementedError
