"""From a run file to the processes of one machine: names, commands, environments, addresses.

Addresses are fixed before anything starts, so a service that dies comes back where the others look for it and
the order of starting does not matter.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from deploy.schema import RunFile
from learner.config import LearnerConfig
from protos.security import OPEN, Security, resolve
from protos.stacks import RUN_VARIABLE
from reward_server.config import RewardConfig
from rollout_server.config import RolloutConfig

LOOPBACK = "127.0.0.1"
LEARNER_END_S = 20.0  # for a learner to end once its ranks have cut and left


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One process to be kept running.

    Example: `Service(name="reward-0", command=("python", "-m", "reward_server", "--config", "F"), log=Path("reward-0.log"), address="127.0.0.1:5", restart=True)`
    """

    name: str
    command: tuple[str, ...]
    log: Path  # appended to
    address: str = ""  # host:port with gRPC health checks; empty: none
    metrics_address: str = ""  # host:port of its figures; empty: it tells none
    environment: dict[str, str] = field(default_factory=dict)  # on top of the launcher's own
    restart: bool = True  # False: its exit ends the run
    security: Security = OPEN  # of health checks
    grace_s: float = 0.0  # from SIGTERM to SIGKILL, where it needs more than the launcher's own


def free_addresses(count: int) -> list[str]:
    """Loopback addresses whose ports nothing held a moment ago, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [f"{LOOPBACK}:{each.getsockname()[1]}" for each in sockets]


def local_services(run: RunFile) -> list[Service]:
    """Writes resolved configurations under run_dir/resolved/launch and names the processes, reward servers first."""
    num_rewards = run.reward.replicas if run.reward else 0
    count = 1 + num_rewards + run.rollout.replicas
    addresses = free_addresses(2 * count)
    learner_address, *free = addresses[:count]
    metrics = iter(addresses[count:])
    if "address" in run.learner.model_fields_set:
        learner_address = _fixed(run.learner.address, learner_address)
    rewards = free[:num_rewards]
    return [
        *_rewards(run, rewards, metrics),
        *_rollouts(run, free[num_rewards:], learner_address, rewards, metrics),
        _learner(run, learner_address, next(metrics)),
    ]


def describe(run: RunFile) -> dict[str, Any]:
    """What would be started, as plain data, for --dry-run: nothing is written."""
    num_rewards = run.reward.replicas if run.reward else 0
    return {
        "run_dir": str(run.run_dir),
        "processes": ["learner", *_names("rollout", run.rollout.replicas), *_names("reward", num_rewards)],
        "groups_open_at_most": max_open_groups(run.learner),
        "samples_a_step": run.learner.groups_per_step * (run.learner.sampling.group_size + (run.learner.algorithm.advantage.kind == "greedy_baseline")),
        "run": run.model_dump(mode="json"),
    }


def max_open_groups(learner: LearnerConfig) -> int:
    """(S + 1) * P - (W - 1), see docs/staleness.md; with an adaptive S at its highest."""
    staleness = learner.staleness
    return (staleness.highest + 1) * learner.groups_per_step - (staleness.window - 1)


def _fixed(address: str, free: str) -> str:
    """The given address, with the free one's port in place of port 0."""
    host, _, port = address.rpartition(":")
    return f"{host}:{free.rpartition(':')[2]}" if port == "0" else address


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{index}" for index in range(count)]


def _metrics_address(run: RunFile, section: LearnerConfig | RolloutConfig | RewardConfig, free: str) -> str:
    """Where a service tells its figures: what its section says, else a free port of observability.host."""
    if section.metrics_address:
        return _fixed(section.metrics_address, free)
    return _fixed(f"{run.observability.host}:0", free) if run.observability.metrics else ""


def _rewards(run: RunFile, addresses: list[str], metrics: Iterator[str]) -> Iterator[Service]:
    if run.reward is None:
        return
    for name, address in zip(_names("reward", len(addresses)), addresses, strict=True):
        yield _service(run, name, "reward_server", run.reward, {"address": address, "metrics_address": _metrics_address(run, run.reward, next(metrics))}, address)


def _rollouts(run: RunFile, addresses: list[str], learner: str, rewards: list[str], metrics: Iterator[str]) -> Iterator[Service]:
    gpus = run.placement.rollout_gpus
    for index, (name, address) in enumerate(zip(_names("rollout", len(addresses)), addresses, strict=True)):
        changes = {
            "address": address,
            "metrics_address": _metrics_address(run, run.rollout, next(metrics)),
            "learner": learner,
            "rewards": rewards or list(run.rollout.rewards),
            "replica_id": f"{run.rollout.replica_id}-{index}" if run.rollout.replica_id else name,
            "seed": run.rollout.seed + index,
        }
        yield _service(run, name, "rollout_server", run.rollout, changes, address, gpus[index] if gpus else ())


def _learner(run: RunFile, address: str, free_for_metrics: str) -> Service:
    changes = {"address": address, "metrics_address": _metrics_address(run, run.learner, free_for_metrics)}
    return _service(run, "learner", "learner", run.learner, changes, address, run.placement.learner_gpus)


def _service(
    run: RunFile, name: str, module: str, section: BaseModel, changes: dict[str, Any], address: str, gpus: tuple[int, ...] = ()
) -> Service:
    config = {**section.model_dump(mode="json"), **changes}
    config.pop("replicas", None)
    file = run.run_dir / "resolved" / "launch" / f"{name}.json"
    write_atomically(file, json.dumps(config, indent=2) + "\n")
    return Service(
        name=name,
        command=(sys.executable, "-m", module, "--config", str(file)),
        log=run.run_dir / "logs" / f"{name}.log",
        address=address,
        metrics_address=config["metrics_address"],
        environment={RUN_VARIABLE: str(run.run_dir.resolve()), **_environment(gpus)},
        restart=module != "learner",
        security=resolve(run.security),
        grace_s=run.learner.checkpoint.leave_s + LEARNER_END_S if module == "learner" else 0.0,
    )


def _environment(gpus: tuple[int, ...]) -> dict[str, str]:
    """What a service sees besides the launcher's own environment, which stays where it says something else."""
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    # Engine and trainer share the cores, and a waiting thread that spins takes one from the other: two processes that multiply
    # matrices with two threads each on two busy cores did 2.5 times as much with passive waiting.
    return shown if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE", **shown}


def write_atomically(file: Path, text: str) -> None:
    """Readers see the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(file)
