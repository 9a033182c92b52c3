"""From a run file to its processes, before it is known where each runs: names, modules, configurations, who needs whose address.

A launcher finds an address for each (`Where`), and `configured` makes of both what the process is started with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from deploy.gpus_here import names_of
from deploy.schema import RunFile
from learner.config import LearnerConfig
from protos.security import OPEN, Security, resolve
from reward_server.config import RewardConfig
from rollout_server.config import RolloutConfig

LEARNER = "learner"
LEARNER_END_S = 20.0  # for a learner to end once its ranks have cut and left
OF_LAUNCHER = ("replicas", "scale")  # fields of a section that no service knows
RANKS_RESTARTS = 3  # of all ranks together, by torchrun, before the launcher starts torchrun again
Role = Literal["learner", "ranks", "rollout", "reward"]
MODULES: dict[Role, str] = {"learner": "learner", "rollout": "rollout_server", "reward": "reward_server", "ranks": "torch.distributed.run"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where a process is found. Example: `Where(address="127.0.0.1:7430", metrics="")`"""

    address: str  # host:port of its gRPC service
    metrics: str  # host:port of its figures; empty: it tells none


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of a run; of role ranks: the torchrun of one machine. Example: see `processes`."""

    name: str  # rollout-1
    role: Role
    config: dict[str, Any]  # of its service, without addresses
    log: Path  # appended to, on the launcher's machine
    wants: str  # host:port it is to listen on; port 0 or empty: a free one
    wants_metrics: str  # the same of its figures; empty: none
    needs: tuple[str, ...] = ()  # processes whose addresses its configuration holds
    arguments: tuple[str, ...] = ()  # of its module, before `--config FILE`
    gpus: tuple[int, ...] = ()  # device numbers on its machine; empty: what its environment shows
    restart: bool = True  # False: its exit ends the run
    leaves: bool = True  # it may end by itself with 0: a replica at the end of the run, or one that was asked to leave
    security: Security = OPEN  # of health checks
    health: str = ""  # service that health checks ask for
    grace_s: float = 0.0  # from SIGTERM to SIGKILL, where it needs more than the launcher's own


def processes(run: RunFile) -> list[Process]:
    """Reward servers first, the learner last; of the replicas those that a run begins with. Raises ValueError for a secret that is not there."""
    num_rewards = run.reward.replicas if run.reward else 0
    num_machines = len(run.ranks_by_machine())
    return [
        *(_process(run, "reward", index) for index in range(num_rewards)),
        *(rollout(run, index) for index in range(run.rollout.replicas)),
        *(_ranks(run, index) for index in range(num_machines if num_machines > 1 else 0)),
        _process(run, "learner", 0),
    ]


def rollout(run: RunFile, index: int) -> Process:
    """The replica of this number, also one beyond those that the run begins with."""
    return _process(run, "rollout", index)


def name_of(role: Role, index: int) -> str:
    """rollout-1, or learner: there is one."""
    return LEARNER if role == "learner" else f"{role}-{index}"


def configured(process: Process, own: Where, others: Mapping[str, str]) -> dict[str, Any]:
    """What the process is started with. others: address of each of `needs`."""
    config = {**process.config, "address": own.address, "metrics_address": own.metrics}
    if process.role == "rollout" and LEARNER in process.needs:
        config["learner"] = others[LEARNER]
        config["rewards"] = [others[name] for name in process.needs if name != LEARNER] or config["rewards"]
    return config


def command_of(process: Process, own: Where, others: Mapping[str, str]) -> tuple[str, ...]:
    """Module and arguments, to which the launcher adds `--config FILE`. torchrun's meet at the address of ranks-0 (docs/durability.md)."""
    if process.role != "ranks":
        return MODULES[process.role], *process.arguments
    meeting = {**others, process.name: own.address}[name_of("ranks", 0)]
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--local-addr", own.address.rpartition(":")[0])
    return MODULES["ranks"], *process.arguments, *place, "-m", "learner.trainer", "--gateway", others[LEARNER]


def environment_of(gpus: tuple[int, ...]) -> dict[str, str]:
    """What a service sees besides the launcher's own environment, which stays where it says something else."""
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(names_of(gpus)), "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")} if gpus else {}
    # Engine and trainer share the cores, and a waiting thread that spins takes one from the other: two processes that multiply
    # matrices with two threads each on two busy cores did 2.5 times as much with passive waiting.
    return shown if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE", **shown}


def _ranks(run: RunFile, index: int) -> Process:
    """torchrun of one of several machines of the learner."""
    learner, ranks = _process(run, "learner", 0), run.ranks_by_machine()
    first = name_of("ranks", 0)
    name = name_of("ranks", index)
    return replace(
        learner,
        name=name,
        role="ranks",
        log=learner.log.with_name(f"{name}.log"),
        wants="",
        wants_metrics="",
        needs=(LEARNER, *(() if index == 0 else (first,))),
        arguments=("--nnodes", str(len(ranks)), "--nproc-per-node", str(ranks[index]), "--max-restarts", str(RANKS_RESTARTS), "--rdzv-id", "headrace"),
        restart=True,
    )


def _process(run: RunFile, role: Role, index: int) -> Process:
    section = {"learner": run.learner, "rollout": run.rollout, "reward": run.reward, "ranks": run.learner}[role]
    assert section is not None, "a run without a reward section has no reward processes"
    name = name_of(role, index)
    config = {key: value for key, value in section.model_dump(mode="json").items() if key not in OF_LAUNCHER}
    if isinstance(section, RolloutConfig):
        config |= {"replica_id": f"{section.replica_id}-{index}" if section.replica_id else name, "seed": section.seed + index}
    rewards = tuple(name_of("reward", each) for each in range(run.reward.replicas if run.reward else 0))
    return Process(
        name=name,
        role=role,
        config=config,
        log=_logs(run) / f"{name}.log",
        wants=run.learner.address if role == "learner" and "address" in run.learner.model_fields_set else "",
        wants_metrics=_wants_metrics(run, section),
        needs=(LEARNER, *rewards) if role == "rollout" else (),
        arguments=("--gateway-only",) if role == "learner" and len(run.ranks_by_machine()) > 1 else (),
        gpus=_gpus(run, role, index),
        restart=role != "learner",
        leaves=role != "reward",
        security=resolve(run.security),
        health="live" if role == "rollout" else "",  # up, though its learner may not have come yet: a demo asks the base model first
        grace_s=run.learner.checkpoint.leave_s + LEARNER_END_S if role == "learner" else 0.0,
    )


def _gpus(run: RunFile, role: Role, index: int) -> tuple[int, ...]:
    if role == "learner":
        return run.placement.learner_gpus
    listed = run.placement.rollout_gpus if role == "rollout" else run.placement.reward_gpus
    return listed[index] if index < len(listed) else ()


def _logs(run: RunFile) -> Path:
    save_dir = run.cluster.logging.save_dir if run.cluster else ""
    return Path(save_dir) if save_dir else run.run_dir / "logs"


def _wants_metrics(run: RunFile, section: BaseModel) -> str:
    """What its section says, else a free port of observability.host."""
    assert isinstance(section, LearnerConfig | RolloutConfig | RewardConfig)
    return section.metrics_address or (f"{run.observability.host}:0" if run.observability.metrics else "")
