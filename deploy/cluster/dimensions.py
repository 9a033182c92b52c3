"""How a role is cut, and what it cannot be cut by yet. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from deploy.cluster.config import DIMENSIONS, TRAINED, ClusterConfig, Parallelism, RoleName, Roles
from deploy.cluster.devices import devices_of, num_devices

# What each role has. The learner: FSDP2 over one dimension (learner/trainer/world.py). A replica: vLLM's tensor and pipeline parallelism, and several engines
# behind one address (rollout_server/engines.py).
HAS: dict[RoleName, tuple[str, ...]] = {
    "actor": ("shard",),
    "critic": ("shard",),
    "reference": ("shard",),
    "rollout": ("data", "tensor", "pipeline", "engines"),
    "reward_model": ("data",),
}
INSTEAD = {
    "data": "a trained role is cut by shard",
    "shard": "copies are said by data",
    "replicate": "use shard over all ranks",
    "tensor": "use shard: no rank holds a whole layer for longer than its turn",
    "pipeline": "use shard",
    "engines": "a replica alone has several",
    "context": "use shorter rows (trainer.row_tokens) and trainer.recompute",
}
OPEN_DIMENSION: dict[RoleName, str] = {"actor": "shard", "critic": "shard", "reference": "shard", "rollout": "data", "reward_model": "data"}
OF_REPLICA = ("tensor", "pipeline", "engines")  # dimensions of one replica, whose GPUs are of one machine
Cut = Mapping[str, int]  # dimension to its size, all of DIMENSIONS


def gpus_of_replica(cut: Cut) -> int:
    """GPUs of one replica of a role that is cut so."""
    return prod(cut[name] for name in OF_REPLICA)


def cuts_of(cluster: ClusterConfig, roles: Roles) -> dict[RoleName, Cut]:
    """Each role's dimensions, with the open one filled in: GPUs divided by the others, 1 on CPUs."""
    devices = devices_of(cluster)
    return {name: _cut(role.parallelism, OPEN_DIMENSION[name], num_devices(devices, role)) for name, role in roles.named().items()}


def _cut(parallelism: Parallelism, opened: str, count: int) -> Cut:
    given = {name: getattr(parallelism, name) for name in DIMENSIONS}
    others = prod(size or 1 for name, size in given.items() if name != opened)
    sizes = {name: size or 1 for name, size in given.items()}
    return {**sizes, opened: given[opened] or max(1, count // others)}


def dimension_mistakes(cluster: ClusterConfig, roles: Roles) -> Iterator[str]:
    """Dimensions that a role does not have, products that are not the number of its GPUs, trained roles away from the actor."""
    devices, cuts = devices_of(cluster), cuts_of(cluster, roles)
    for name, role in roles.named().items():
        cut, missing = cuts[name], False
        for dimension in DIMENSIONS:
            if cut[dimension] > 1 and dimension not in HAS[name]:
                missing = True
                yield f"roles.{name}.parallelism.{dimension}={cut[dimension]}: {_who(name)} does not have this dimension yet, it has {' and '.join(HAS[name])}; {INSTEAD[dimension]}"
        count = num_devices(devices, role)
        if count and not missing and prod(cut.values()) != count:
            sizes = " x ".join(f"{dimension} {size}" for dimension, size in cut.items() if size > 1) or "1"
            yield f"roles.{name}.parallelism: {sizes} = {prod(cut.values())}, and gpu_group {role.gpu_group} has {count} GPUs: the product is their number; change one of the two"
    yield from _on_one_machine(cluster, roles, cuts)
    yield from _trained_together(roles, cuts)
    yield from _machines_of_cpus(cluster, roles, cuts["actor"]["shard"])


def _on_one_machine(cluster: ClusterConfig, roles: Roles, cuts: Mapping[RoleName, Cut]) -> Iterator[str]:
    """A replica's process, or a reward server's, sees the GPUs of one machine."""
    for name in ("rollout", "reward_model"):
        role = roles.named().get(name)
        if role is None or role.gpu_group is None:
            continue
        group, count = cluster.gpu_groups[role.gpu_group], num_devices(devices_of(cluster), role)
        each = gpus_of_replica(cuts[name]) if name == "rollout" else count // cuts[name]["data"]
        if each * cuts[name]["data"] == count and group.gpus_per_node % each:
            yield f"roles.{name}.parallelism: one {_who(name)[2:]} has {each} GPUs, and gpu_group {role.gpu_group} has {group.gpus_per_node} on a machine: it would lie on two machines, and each lies on one; use a number that divides {group.gpus_per_node}"


def _machines_of_cpus(cluster: ClusterConfig, roles: Roles, shard: int) -> Iterator[str]:
    for name, role in roles.named().items():
        nodes = cluster.node_group(role.node_group or "")
        if role.num_nodes > 1 and name != "actor":
            yield f"roles.{name}.num_nodes={role.num_nodes}: one process of this role is on one machine; say how many there are by parallelism.data"
        elif role.num_nodes > (nodes.count if nodes is not None else cluster.num_nodes):
            yield f"roles.{name}.num_nodes={role.num_nodes}: there are {nodes.count if nodes is not None else cluster.num_nodes} machines; use fewer, or raise cluster.node_groups count"
    if shard % roles.actor.num_nodes:
        yield f"roles.actor.num_nodes={roles.actor.num_nodes}: {shard} ranks cannot be spread over them evenly; use a number that divides {shard}"


def _trained_together(roles: Roles, cuts: Mapping[RoleName, Cut]) -> Iterator[str]:
    for name in TRAINED[1:]:
        role = roles.named().get(name)
        if role is None:
            continue
        if (role.gpu_group, role.node_group) != (roles.actor.gpu_group, roles.actor.node_group):
            yield f"roles.{name}.gpu_group={role.gpu_group}: the learner does not have a {name} on GPUs of its own yet, it lives in the actor's ranks (gpu_group {roles.actor.gpu_group}); name that group"
        elif cuts[name] != cuts["actor"]:
            yield f"roles.{name}.parallelism differs from roles.actor.parallelism: both live in the same ranks; leave it out"


def _who(name: RoleName) -> str:
    return "the learner" if name in TRAINED else {"rollout": "a replica", "reward_model": "a reward server"}[name]
