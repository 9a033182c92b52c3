"""What each backend of `headrace launch` can do with a run file. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.mistakes import Mistakes
from deploy.schema import RunFile

THERE = ("local", "ray")


def check(run: RunFile, backend: str) -> None:
    """Raises Mistakes for what this backend cannot do with the run."""
    if found := list(_mistakes(run, backend)):
        raise Mistakes(found)


def _mistakes(run: RunFile, backend: str) -> Iterator[str]:
    if backend not in THERE:
        yield f"--backend {backend}: not there yet; use local on one machine, ray on several ({'KubeRay gives a Ray cluster on Kubernetes' if backend == 'kubernetes' else 'start Ray inside the allocation: srun ray start'}), then cluster.ray.address"
        return
    cluster = run.cluster
    if backend == "local" and cluster is not None and cluster.num_nodes > 1:
        yield f"--backend local: cluster.node_groups has {cluster.num_nodes} machines, and local starts everything on this one; use --backend ray, or a cluster of one machine"
    if backend != "ray" or cluster is None:
        return
    for name, group in cluster.gpu_groups.items():
        if group.shared:
            yield f"--backend ray: cluster.gpu_groups.{name} is shared, and Ray gives a GPU to one process; use --backend local, or a group for each role"
