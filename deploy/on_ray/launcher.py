"""Keeps the services of a run going on a Ray cluster, each in an actor that owns its process.

    _live:  bundle ─▶ actor (Host) ─▶ addresses ─▶ process ─▶ polls ─▶ exit code, or: actor lost
              └ of its role's placement group, which Ray moves to other machines when it loses one

consumes: answers of the actors (exit codes, logs).  produces: logs in the run folder, addresses, events.
waits for: room in the cluster, addresses of the services that a process needs; unblocked by: their actors, deadlines.
A process whose neighbours have moved is started again with the new addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.keeper import Keeper, Life, Policy, exit_words
from deploy.on_ray.host import Host
from deploy.on_ray.placing import Bundle, Group, bundle_of, groups_of
from deploy.processes import LEARNER, Process, Where, command_of, configured, environment_of

log = logging.getLogger("headrace.deploy.on_ray")
POLL_S = 0.3
ANSWER_S = 60.0  # an actor that has not answered by then is lost
ROOM_S = 600.0  # for a cluster to make room, a lost machine's detection included
RETRY_S = 1.0  # between two tries to place a process while Ray has not noticed yet that a machine is gone
PATIENCE_S = 20.0  # after which waiting for room is told
# Of the launcher's environment, what goes to services on other machines as well.
PASSED_ON = ("HEADRACE_", "VLLM_", "NCCL_", "GLOO_", "TORCH", "HF_", "OMP_", "RES_OPTIONS", "TOKENIZERS_", "PYTHONPATH")


class Moved(Exception):
    """A process that another needs has a new address."""


class OnRay(Keeper[Process]):
    """The launcher on a cluster that this process is connected to (see cluster.py). Example: see Keeper."""

    def __init__(
        self, run_dir: Path, processes: list[Process], *, policy: Policy | None = None, on_event: Callable[[str], None] = log.info, on_move: Callable[[Mapping[str, Where]], None] = lambda _: None,
        num_gpus: Mapping[str, int] | None = None, node_groups: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """processes: those that the run begins with; on_move: told all addresses whenever one is new; num_gpus, node_groups: see placing.py;
        environment: of every service on top of what is passed on."""
        super().__init__(policy, on_event)
        self._run_dir = run_dir.absolute()
        self._num_gpus, self._node_groups = num_gpus or {}, node_groups or {}
        self._environment = {**{name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}, **(environment or {})}
        self._on_move = on_move
        self._groups = groups_of(processes, self._num_gpus, self._node_groups)
        self._placed: dict[str, PlacementGroup] = {}  # by the name of a group
        self._where: dict[str, Where] = {}
        self._moved = asyncio.Condition()
        self._held: dict[str, asyncio.Event] = {}
        self._told: dict[str, int] = {}  # bytes of a process' log that are in its file here, of its present life
        self._hosts: dict[str, Any] = {}  # actors, by the name of their process

    @property
    def groups(self) -> list[Group]:
        """What the run begins with."""
        return self._groups

    def where(self, name: str) -> Where:
        """Where a process that has started is found."""
        return self._where[name]

    def hold(self, name: str) -> None:
        """The process of this name gets its place and address only, until it is released."""
        self._held[name] = asyncio.Event()

    def release(self, name: str) -> None:
        """Lets it run."""
        self._held[name].set()

    def forget(self, name: str) -> None:
        """A process that was stopped for good has no address."""
        self._where.pop(name, None)
        self._on_move(self._where)

    async def __aexit__(self, *details: Any) -> None:
        await super().__aexit__(*details)
        for group in self._placed.values():
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def _kill_all(self) -> None:
        for host in self._hosts.values():
            ray.kill(host, no_restart=True)

    async def _live(self, service: Process) -> Life:
        host = self._new_host(service)
        placed = False
        try:
            own = await self._address(host, service)
            placed = True
            return await self._life_in(host, service, own)
        except asyncio.CancelledError:
            await self._terminate(host, service)
            raise
        except Moved as moved:
            await self._terminate(host, service)
            return Life(code=0, words=str(moved), again=True, is_fault=False)
        except (RayError, TimeoutError) as error:
            await asyncio.sleep(0 if placed else RETRY_S)
            return Life(code=1, words=_lost(error), again=True, is_fault=placed or isinstance(error, TimeoutError))
        finally:
            self._hosts.pop(service.name, None)
            with contextlib.suppress(RayError):
                ray.kill(host, no_restart=True)
            self._free_own_group(service)

    async def _life_in(self, host: Any, service: Process, own: Where) -> Life:
        if lacking := await _ask(host.lacks.remote(str(self._run_dir) if service.role in ("learner", "ranks") else "", os.getcwd())):
            return self._refused(service, lacking)
        await self._tell(service.name, own)
        if service.name in self._held:
            await self._held[service.name].wait()
        others = await self._others(service)
        config = json.dumps(configured(service, own, others), indent=2)
        environment = {**self._environment, **environment_of(())}
        await _ask(host.start.remote(command_of(service, own, others), config + "\n", environment, os.getcwd()))
        async with self._checking(service.name, own.address if service.role != "ranks" else "", service.security, service.health):
            code = await self._watch(host, service, others)
        await _ask(host.clean.remote())
        return Life(code=code, words=exit_words(code))

    def _new_host(self, service: Process) -> Any:
        group, index, bundle = self._room(service)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        resources = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        actor: Any = ray.remote(Host).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), resources=resources, max_restarts=0, max_task_retries=0, scheduling_strategy=strategy,
        )  # fmt: skip
        host = actor.remote(service.name, "")
        self._hosts[service.name] = host
        return host

    def _room(self, service: Process) -> tuple[PlacementGroup, int, Bundle]:
        """The placement group of a process, made when it is needed first, and its bundle there."""
        found = next((group for group in self._groups if service.name in group.members), None)
        if found is None:  # started by load
            bundle = bundle_of(service, self._num_gpus, self._node_groups)
            found = Group(name=service.name, strategy="PACK", bundles=(bundle,), members=(service.name,))
        if found.name not in self._placed:
            self._placed[found.name] = placement_group(list(found.bundles), strategy=found.strategy)
        index = found.members.index(service.name)
        return self._placed[found.name], index, found.bundles[index]

    def _free_own_group(self, service: Process) -> None:
        if (group := self._placed.get(service.name)) is not None and not any(service.name == each.name for each in self._groups):
            del self._placed[service.name]
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    async def _address(self, host: Any, service: Process) -> Where:
        """Waits for the actor's place. What it listened on before is asked for again where it comes back to the same machine."""
        wants = (service.wants, *([service.wants_metrics] if service.wants_metrics else []))
        before = self._where.get(service.name)
        asked = asyncio.ensure_future(_ask(host.addresses.remote(wants, (before.address, before.metrics) if before else ()), limit_s=ROOM_S))
        done, _ = await asyncio.wait({asked}, timeout=PATIENCE_S)
        if not done:
            self._on_event(f"{service.name} waits for room in the cluster: {self._room(service)[2]}")
        found = await asked
        return Where(address=found[0], metrics=found[1] if service.wants_metrics else "")

    async def _others(self, service: Process) -> dict[str, str]:
        """Addresses of what the process needs, once they are known."""
        async with self._moved:
            await asyncio.wait_for(self._moved.wait_for(lambda: all(name in self._where for name in service.needs)), ROOM_S)
        if service.role == "ranks":  # they read what the gateway wrote into the run folder
            await asyncio.wait_for(self._ready[LEARNER].wait(), ROOM_S)
        async with self._moved:
            return {name: self._where[name].address for name in service.needs}

    async def _tell(self, name: str, own: Where) -> None:
        if self._where.get(name) == own:
            return
        self._where[name] = own
        self._on_move(self._where)
        async with self._moved:
            self._moved.notify_all()

    async def _watch(self, host: Any, service: Process, others: Mapping[str, str]) -> int:
        """The exit code. Raises Moved when an address that the process was given is another now, RayError when the actor is lost."""
        self._told[service.name] = 0
        while True:
            code, said = await self._poll(host, service)
            if code is not None and not said:
                return code
            if stale := [name for name, address in others.items() if self._where[name].address != address]:
                raise Moved(f"{stale[0]} is at {self._where[stale[0]].address} now")
            if not said:
                await asyncio.sleep(POLL_S)

    async def _poll(self, host: Any, service: Process) -> tuple[int | None, bool]:
        """(exit code, whether the process had written something, which is in its log here now)."""
        offset = self._told.get(service.name, 0)
        code, said = await _ask(host.poll.remote(offset))
        if said:
            service.log.parent.mkdir(parents=True, exist_ok=True)
            with service.log.open("ab") as file:
                file.write(said)
            self._told[service.name] = offset + len(said)
        return (None if code is None else int(code)), bool(said)

    async def _terminate(self, host: Any, service: Process) -> None:
        """SIGTERM, then SIGKILL after the grace; what it says meanwhile is logged."""
        grace_s = max(self._policy.grace_s, service.grace_s)
        with contextlib.suppress(RayError, TimeoutError):
            await _ask(host.signal.remote(int(signal.SIGTERM)), limit_s=grace_s)
            with contextlib.suppress(TimeoutError, AssertionError):
                await asyncio.wait_for(self._until_gone(host, service), grace_s)
            await _ask(host.clean.remote(), limit_s=grace_s)

    async def _until_gone(self, host: Any, service: Process) -> None:
        while True:
            code, said = await self._poll(host, service)
            if code is not None and not said:
                return
            if not said:
                await asyncio.sleep(POLL_S)

    def _refused(self, service: Process, why: str) -> Life:
        service.log.parent.mkdir(parents=True, exist_ok=True)
        with service.log.open("a") as file:
            file.write(f"headrace: {why}\n")
        return Life(code=2, words=why)


async def _ask(answer: Any, *, limit_s: float = ANSWER_S) -> Any:
    """An actor's answer. Raises RayError when the actor is lost, TimeoutError."""
    return await asyncio.wait_for(asyncio.wrap_future(answer.future()), limit_s)


def _lost(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "its machine did not answer, or no machine had room for it"
    if isinstance(error, OutOfMemoryError):
        return "Ray killed it, since the memory of its machine was nearly full: place fewer services there, or start its raylet with another RAY_memory_usage_threshold"
    return f"its actor or its machine was lost: {type(error).__name__}"
