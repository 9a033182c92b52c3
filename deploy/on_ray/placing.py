"""Which room of the cluster each process is given. Pure.

A role is a placement group: a bundle for each of its processes. A replica that is started by load has one of its own, which goes when it stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.processes import Process

CPUS = {"learner": 1.0, "ranks": 1.0, "rollout": 1.0, "reward": 1.0}  # logical: Ray counts them and binds nothing to them
STRATEGIES = {"learner": "PACK", "ranks": "STRICT_SPREAD", "rollout": "SPREAD", "reward": "SPREAD"}  # one torchrun a machine; what serves should not be lost at once
Bundle = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One placement group. Example: `Group(name="rollout", strategy="SPREAD", bundles=({"CPU": 1.0},), members=("rollout-0",))`"""

    name: str
    strategy: str
    bundles: tuple[Bundle, ...]
    members: tuple[str, ...]  # the process of each bundle


def bundle_of(process: Process, num_gpus: Mapping[str, int], node_groups: Mapping[str, str]) -> Bundle:
    """Room of one process. num_gpus: of a process, by role; node_groups: the group of machines that a role runs on, by role; missing: any."""
    bundle: Bundle = {"CPU": CPUS[process.role]}
    if gpus := num_gpus.get(process.role, 0):
        bundle["GPU"] = float(gpus)
    if group := node_groups.get(process.role):
        bundle[label_of(group)] = 0.001  # machines of the group declare 1 of it: any number of processes fits
    return bundle


def groups_of(processes: Sequence[Process], num_gpus: Mapping[str, int], node_groups: Mapping[str, str]) -> list[Group]:
    """A placement group for each role that has processes."""
    by_role: dict[str, list[Process]] = {}
    for process in processes:
        by_role.setdefault(process.role, []).append(process)
    return [
        Group(
            name=role,
            strategy=STRATEGIES[role],
            bundles=tuple(bundle_of(process, num_gpus, node_groups) for process in members),
            members=tuple(process.name for process in members),
        )
        for role, members in by_role.items()
    ]


def label_of(node_group: str) -> str:
    """The custom resource that the machines of a node group declare."""
    return f"headrace-{node_group}"


def missing(groups: Sequence[Group], cluster: Mapping[str, float]) -> str:
    """What the cluster has too little of, with the numbers; empty: enough."""
    wanted: Bundle = {}
    for group in groups:
        for bundle in group.bundles:
            for name, amount in bundle.items():
                wanted[name] = wanted.get(name, 0.0) + amount
    short = [f"{name}: {amount:g} wanted, {cluster.get(name, 0.0):g} there" for name, amount in sorted(wanted.items()) if amount > cluster.get(name, 0.0)]
    return "; ".join(short)
