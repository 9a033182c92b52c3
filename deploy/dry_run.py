"""What would be started, where, with which command: `headrace launch --dry-run`. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.cluster.apply import machines
from deploy.cluster.devices import devices_of
from deploy.cluster.fits import needs_of, unknown_sizes
from deploy.cluster.memory import words_of
from deploy.processes import LEARNER, Process, Where, command_of, processes
from deploy.schema import RunFile
from learner.config import LearnerConfig

Placed = dict[str, Any]


def describe(run: RunFile, backend: str = "local") -> dict[str, Any]:
    """As plain data: who runs where with which command, memory of each GPU group, and the resolved run."""
    started = processes(run)
    learner = run.learner
    return {
        "run_dir": str(run.run_dir),
        "backend": backend,
        "processes": [LEARNER, *(process.name for process in started if process.role == "ranks"), *(process.name for process in started if process.role == "rollout"), *(process.name for process in started if process.role == "reward")],
        "placed": [_placed(run, process, backend) for process in started],
        **({"before": list(ray_lines(run))} if backend == "ray" else {}),
        "memory": dict(memory_lines(run)),
        "groups_open_at_most": max_open_groups(learner),
        "samples_a_step": learner.groups_per_step * (learner.sampling.group_size + (learner.algorithm.advantage.kind == "greedy_baseline")),
        "run": run.model_dump(mode="json"),
    }


def max_open_groups(learner: LearnerConfig) -> int:
    """(S + 1) * P - (W - 1), see docs/staleness.md; with an adaptive S at its highest."""
    staleness = learner.staleness
    return (staleness.highest + 1) * learner.groups_per_step - (staleness.window - 1)


def ray_lines(run: RunFile) -> Iterator[str]:
    """The `ray start` line of each machine: which node group it belongs to is a resource that it declares."""
    cluster = run.cluster
    if cluster is None or not cluster.ray.address:
        yield f"a Ray cluster of {cluster.ray.local_nodes if cluster else 1} node(s) is started on this machine, and ends with the run"
        return
    head = True
    for group in cluster.node_groups:
        for index in range(group.count):
            name = cluster.ray.ssh.format(index=index, group=group.name) if cluster.ray.ssh else f"{group.name}-{index}"
            how = "--head --port 6379" if head else "--address HEAD:6379"
            yield f"{name}: ray start {how} --num-gpus {group.gpus_per_node} --resources '{{\"headrace-{group.name}\": 1}}'"
            head = False


def memory_lines(run: RunFile) -> Iterator[tuple[str, list[str]]]:
    """Of each GPU group: what its roles take of a GPU, with the arithmetic."""
    for group, needs in needs_of(run).items():
        yield group, [f"{need.role}: {words_of(need.terms)}" for need in needs]
    for model in unknown_sizes(run):
        yield "not estimated", [f"model_sizes.{model}: not given, and {model} is no folder here: memory of its GPUs is not estimated"]


def _placed(run: RunFile, process: Process, backend: str) -> Placed:
    return {"name": process.name, "machine": _machine(run, process, backend), "gpus": _gpus(run, process, backend), "command": _command(run, process)}


def _machine(run: RunFile, process: Process, backend: str) -> str:
    if backend == "local":
        return "this machine"
    group = run.machines_of().get(process.role)
    return f"one of node group {group}, as Ray chooses" if group else "any, as Ray chooses"


def _gpus(run: RunFile, process: Process, backend: str) -> str:
    if backend == "local" or run.cluster is None or run.roles is None:
        return ", ".join(map(str, process.gpus)) or ("what the environment shows" if run.cluster is None else "none")
    count = run.num_gpus().get(process.role, 0)
    role = {"learner": run.roles.actor, "ranks": run.roles.actor, "rollout": run.roles.rollout, "reward": run.roles.reward_model}[process.role]
    if not count or role is None or role.gpu_group is None:
        return "none"
    where = "; ".join(f"{nodes}-{node}: {gpus[0]}-{gpus[-1]}" for nodes, node, gpus in machines(devices_of(run.cluster)[role.gpu_group]))
    return f"{count} of GPU group {role.gpu_group} ({where})"


def _command(run: RunFile, process: Process) -> str:
    others: Mapping[str, str] = {name: f"<{name}>" for name in process.needs}
    command = command_of(process, Where(address=process.wants or f"<{process.name}>", metrics=""), others)
    environment = " ".join(f"{name}={value}" for name, value in run.environment().items())
    return " ".join(part for part in (environment, "python -m", *command, "--config", f"{run.run_dir}/resolved/launch/{process.name}.json") if part)
