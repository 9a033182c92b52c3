"""A run's processes on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray

from deploy.cluster.config import ClusterConfig, NodeGroup
from deploy.on_ray.cluster import Node, connected, started
from deploy.on_ray.launcher import OnRay
from deploy.on_ray.placing import label_of, missing
from deploy.processes import Process, Where, processes
from deploy.schema import RunFile
from deploy.scraping import write_scraping

FIRST_IP = 2  # 127.0.0.2: Ray takes 127.0.0.1 for the machine's outer address


class RayFleet:
    """See fleet.py. Addresses are those of the machines that Ray chose; where one changes, who needs it is started again."""

    def __init__(self, run: RunFile, on_event: Callable[[str], None]) -> None:
        self._run, self._on_event = run, on_event
        self.first = processes(run)
        self._keeper = OnRay(
            run.run_dir, self.first, on_event=on_event, on_move=self._tell_prometheus,
            num_gpus=run.num_gpus(), node_groups=run.machines_of(), environment=run.environment(),
        )  # fmt: skip

    @classmethod
    @contextmanager
    def open(cls, run: RunFile, on_event: Callable[[str], None]) -> Iterator[RayFleet]:
        """Connects to the cluster that the run file names, or starts one here. Raises ValueError when it is not there or too small."""
        cluster = run.cluster
        address = cluster.ray.address if cluster else ""
        if address:
            with connected(address):
                yield cls(run, on_event)
            return
        with started(local_nodes(cluster)) as raylets:
            on_event(f"a Ray cluster is started here: {', '.join(f'{ip} (raylet {pid})' for ip, pid in sorted(raylets.items()))}")
            fleet = cls(run, on_event)
            if short := missing(fleet._keeper.groups, ray.cluster_resources()):
                raise ValueError(f"this machine alone has too little for the run ({short}): give cluster.ray.address of a cluster, or use smaller roles")
            yield fleet

    def keeper(self) -> OnRay:
        return self._keeper

    def start(self, *started: Process, held: tuple[str, ...] = ()) -> None:
        for name in held:
            self._keeper.hold(name)
        for process in started:
            self._keeper.start(process)

    def release(self, name: str) -> None:
        self._keeper.release(name)

    async def stop(self, name: str) -> None:
        await self._keeper.stop(name)
        self._keeper.forget(name)

    def where(self, name: str) -> Where:
        return self._keeper.where(name)

    def _tell_prometheus(self, where: Mapping[str, Where]) -> None:
        write_scraping(self._run, {name: one.metrics for name, one in where.items()})


def local_nodes(cluster: ClusterConfig | None) -> list[Node]:
    """Raylets of a cluster that is started on this machine; each takes part in every node group, and the first has the GPUs."""
    count = cluster.ray.local_nodes if cluster else 1
    groups: tuple[NodeGroup, ...] = cluster.node_groups if cluster else ()
    labels = {label_of(group.name): 1.0 for group in groups}
    num_gpus = max((group.gpus_per_node for group in groups), default=0)
    return [Node(ip=f"127.0.0.{FIRST_IP + index}", num_gpus=0 if index else num_gpus, resources=labels) for index in range(count)]
