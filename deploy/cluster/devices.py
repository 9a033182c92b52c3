"""Which GPU is whose: every GPU of the cluster is counted once, and belongs to one group or to none. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deploy.cluster.config import TRAINED, ClusterConfig, GpuGroup, RoleConfig, RoleName, Roles

RUNS = {"any": ("actor", "critic", "reference", "rollout", "reward_model"), "trainer": TRAINED, "rollout": ("rollout",), "reward": ("reward_model",)}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Device:
    """One GPU. Example: `Device(nodes="train", node=0, gpu=3)` is the fourth GPU of the first machine of group train."""

    nodes: str
    node: int
    gpu: int


def devices_of(cluster: ClusterConfig) -> dict[str, tuple[Device, ...]]:
    """The GPUs of each group that fits; groups take the first free ones, in the order in which they are written.

    Example: two machines of 8, groups a (4 on each) and b (4 on each): a has GPUs 0 to 3 of both, b 4 to 7.
    """
    used: dict[tuple[str, int], int] = {}  # machine to GPUs that are taken
    found: dict[str, tuple[Device, ...]] = {}
    for name, group in cluster.gpu_groups.items():
        nodes = cluster.node_group(group.nodes)
        if nodes is None:
            continue
        fits = [node for node in range(nodes.count) if used.get((group.nodes, node), 0) + group.gpus_per_node <= nodes.gpus_per_node]
        wanted = group.num_nodes or nodes.count
        if len(fits) < wanted:
            continue
        devices = []
        for node in fits[:wanted]:
            first = used.get((group.nodes, node), 0)
            devices += [Device(nodes=group.nodes, node=node, gpu=first + index) for index in range(group.gpus_per_node)]
            used[group.nodes, node] = first + group.gpus_per_node
        found[name] = tuple(devices)
    return found


def device_mistakes(cluster: ClusterConfig) -> Iterator[str]:
    """GPU groups that name no machines, or want more GPUs than are left."""
    found = devices_of(cluster)
    for name, group in cluster.gpu_groups.items():
        nodes = cluster.node_group(group.nodes)
        if nodes is None:
            yield f"cluster.gpu_groups.{name}.nodes={group.nodes}: none of cluster.node_groups {[each.name for each in cluster.node_groups]}; name one of them"
        elif name not in found:
            yield f"cluster.gpu_groups.{name}: {_words(group, nodes.count)} of node group {group.nodes} ({nodes.count} x {nodes.gpus_per_node} GPUs), {_taken(cluster, name)}: every GPU is counted once; take fewer, or add machines"


def _words(group: GpuGroup, count: int) -> str:
    return f"{group.gpus_per_node} GPUs on {group.num_nodes or count} machines"


def _taken(cluster: ClusterConfig, name: str) -> str:
    before = [f"{other} has {_words(group, group.num_nodes or 0) if group.num_nodes else f'{group.gpus_per_node} on each'}" for other, group in cluster.gpu_groups.items() if group.nodes == cluster.gpu_groups[name].nodes and other != name]
    return f"of which {' and '.join(before)}" if before else "of which no other group has any"


def users_of(roles: Roles) -> dict[str, list[RoleName]]:
    """Roles of each GPU group, those that live in the actor's ranks counted with it."""
    found: dict[str, list[RoleName]] = {}
    for name, role in roles.named().items():
        if role.gpu_group is not None:
            found.setdefault(role.gpu_group, []).append(name)
    return found


def role_mistakes(cluster: ClusterConfig, roles: Roles) -> Iterator[str]:
    """Groups that are not there, machines of another role, and sharing that is not said."""
    found = [line for name, role in roles.named().items() for line in _places(cluster, name, role)]
    found += _sharing(cluster, roles)
    yield from found
    if not found:  # a group that is misspelt leaves another one without a role
        for group in cluster.gpu_groups.keys() - users_of(roles).keys():
            yield f"cluster.gpu_groups.{group}: no role uses it, so its GPUs would idle; name it in a role, or remove it"


def _sharing(cluster: ClusterConfig, roles: Roles) -> Iterator[str]:
    for group, users in users_of(roles).items():
        if group not in cluster.gpu_groups:
            continue
        apart = [name for name in users if name not in TRAINED or name == "actor"]
        shared = cluster.gpu_groups[group].shared
        if len(apart) > 1 and not shared:
            yield f"roles.{apart[1]}.gpu_group={group}: {' and '.join(apart)} would share its GPUs, and cluster.gpu_groups.{group} does not say so; give each its own group, or say shared: true"
        if len(apart) < 2 and shared:
            yield f"cluster.gpu_groups.{group}.shared=true: only {' and '.join(users)} uses it; remove shared, or name the group in another role"


def _places(cluster: ClusterConfig, name: RoleName, role: RoleConfig) -> Iterator[str]:
    if role.node_group is not None and cluster.node_group(role.node_group) is None:
        yield f"roles.{name}.node_group={role.node_group}: none of cluster.node_groups {[each.name for each in cluster.node_groups]}; name one of them"
    if role.gpu_group is not None and role.gpu_group not in cluster.gpu_groups:
        yield f"roles.{name}.gpu_group={role.gpu_group}: none of cluster.gpu_groups {list(cluster.gpu_groups)}; name one of them"
        return
    nodes = cluster.node_group(cluster.gpu_groups[role.gpu_group].nodes if role.gpu_group else role.node_group or "")
    if nodes is not None and name not in RUNS[nodes.role]:
        yield f"roles.{name}: runs on node group {nodes.name}, whose role is {nodes.role} (for {', '.join(RUNS[nodes.role])}); use other machines, or role: any"


def num_devices(devices: Mapping[str, tuple[Device, ...]], role: RoleConfig) -> int:
    """GPUs of a role; 0: it runs on CPUs."""
    return len(devices.get(role.gpu_group or "", ()))
