"""What `cluster` and `roles` mean for the other sections: numbers of ranks, replicas, servers, and who sees which GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.cluster.config import ClusterConfig, Roles
from deploy.cluster.devices import Device, device_mistakes, devices_of, role_mistakes
from deploy.cluster.dimensions import cuts_of, dimension_mistakes, gpus_of_replica


def layout_mistakes(cluster: ClusterConfig, roles: Roles) -> list[str]:
    """What cannot be laid out, a line each; empty: nothing."""
    groups = [*device_mistakes(cluster), *role_mistakes(cluster, roles)]
    return groups or list(dimension_mistakes(cluster, roles))


def fill(content: dict[str, Any], cluster: ClusterConfig, roles: Roles) -> list[str]:
    """Writes into the sections what follows from the layout; says where they say something else."""
    cuts = cuts_of(cluster, roles)
    rollout: Any = content.get("rollout")
    rollout = rollout if isinstance(rollout, dict) else {}
    scale = rollout.get("scale")
    replicas = cuts["rollout"]["data"]
    if isinstance(scale, dict) and "most" in scale:  # the GPUs are for the most, a run begins with the least
        if scale["most"] != replicas and roles.rollout.gpu_group:
            return [f"rollout.scale.most={scale['most']} and roles.rollout.parallelism.data={replicas}: GPUs are there for exactly the most replicas; make them agree"]
        replicas = rollout.get("replicas", scale.get("least", 1))
    wanted: list[tuple[tuple[str, ...], Any]] = [
        (("learner", "trainer", "ranks"), cuts["actor"]["shard"]),
        (("rollout", "replicas"), replicas),
        (("rollout", "tensor_parallel"), cuts["rollout"]["tensor"]),
        (("rollout", "pipeline_parallel"), cuts["rollout"]["pipeline"]),
        (("rollout", "engines"), cuts["rollout"]["engines"]),
        *([(("reward", "replicas"), cuts["reward_model"]["data"])] if "reward_model" in cuts and content.get("reward") else []),
    ]
    lines = [line for path, value in wanted for line in _put(content, path, value)]
    if "placement" in content:
        lines.append("placement: roles say who sees which GPU; remove placement")
    elif cluster.num_nodes == 1 and not lines:
        content["placement"] = placement_of(cluster, roles)
    return lines


def ranks_by_machine(cluster: ClusterConfig, roles: Roles) -> list[int]:
    """Ranks of the learner on each of its machines."""
    shard = cuts_of(cluster, roles)["actor"]["shard"]
    if roles.actor.gpu_group is None:
        return [shard // roles.actor.num_nodes] * roles.actor.num_nodes
    return [len(gpus) for _, _, gpus in machines(devices_of(cluster)[roles.actor.gpu_group])]


def placement_of(cluster: ClusterConfig, roles: Roles) -> dict[str, Any]:
    """Device numbers of a cluster of one machine, as `placement` has them."""
    devices, cuts = devices_of(cluster), cuts_of(cluster, roles)
    numbers = {name: [device.gpu for device in devices.get(role.gpu_group or "", ())] for name, role in roles.named().items()}
    servers = cuts.get("reward_model", {}).get("data", 1)
    judges = numbers.get("reward_model", [])
    return {
        "learner_gpus": numbers["actor"],
        "rollout_gpus": pieces(numbers["rollout"], gpus_of_replica(cuts["rollout"])),
        "reward_gpus": pieces(judges, max(1, len(judges) // servers)) if judges else [],
    }


def pieces(numbers: list[int], size: int) -> list[list[int]]:
    """Neighbours together. Example: `pieces([4, 5, 6, 7], 2)` is `[[4, 5], [6, 7]]`."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def machines(devices: tuple[Device, ...]) -> list[tuple[str, int, list[int]]]:
    """(node group, machine, its GPUs) of a set of devices, in order."""
    found: dict[tuple[str, int], list[int]] = {}
    for device in devices:
        found.setdefault((device.nodes, device.node), []).append(device.gpu)
    return [(nodes, node, gpus) for (nodes, node), gpus in found.items()]


def _put(content: dict[str, Any], path: tuple[str, ...], value: int) -> Iterator[str]:
    here = content
    for part in path[:-1]:
        below = here.setdefault(part, {})
        if not isinstance(below, dict):
            return  # another line says what is wrong with it
        here = below
    if here.setdefault(path[-1], value) != value:
        yield f"{'.'.join(path)}={here[path[-1]]} and roles say {value}: roles say how many there are; remove {'.'.join(path)}"
