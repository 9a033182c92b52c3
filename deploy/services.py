"""The processes of a run on one machine: commands, environments, addresses.

Addresses are fixed before anything starts, so a service that dies comes back where the others look for it and
the order of starting does not matter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from deploy.processes import Process, Where, command_of, configured, environment_of
from deploy.schema import RunFile
from protos.security import OPEN, Security

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 20_000  # below lie well-known ones, and those of Ray's workers
TRIES = 8  # ports tried for an address


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
    leaves: bool = True  # it may end by itself with 0
    security: Security = OPEN  # of health checks
    health: str = ""  # service that health checks ask for
    grace_s: float = 0.0  # from SIGTERM to SIGKILL, where it needs more than the launcher's own


def free_addresses(count: int) -> list[str]:
    """Loopback addresses whose ports nothing held a moment ago, all different; where there is room, none that the kernel gives to outgoing connections.

    One of those could be taken while a service that had it starts again.
    """
    room = range(LOWEST_PORT, _first_outgoing_port())
    wanted = iter(random.SystemRandom().sample(room, TRIES * count) if len(room) >= TRIES * count else ())
    with ExitStack() as held:
        sockets = [_bound(held, wanted) for _ in range(count)]
        return [f"{LOOPBACK}:{each.getsockname()[1]}" for each in sockets]


def _bound(held: ExitStack, wanted: Iterator[int]) -> socket.socket:
    """A socket on the next of the wanted ports that is free, else on any."""
    made = held.enter_context(socket.socket())
    for port in (*itertools.islice(wanted, TRIES), 0):
        with contextlib.suppress(OSError):
            made.bind((LOOPBACK, port))
            return made
    raise OSError("no loopback port is free")


def _first_outgoing_port() -> int:
    """Of Linux; 0 where that is not known."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def local_service(run: RunFile, process: Process, own: Where, others: Mapping[str, str]) -> Service:
    """One process of this machine; writes its configuration. others: address of each that it needs."""
    file = run.run_dir / "resolved" / "launch" / f"{process.name}.json"
    write_atomically(file, json.dumps(configured(process, own, others), indent=2) + "\n")
    return Service(
        name=process.name,
        command=(sys.executable, "-m", *command_of(process, own, others), "--config", str(file)),
        log=process.log,
        address=own.address,
        metrics_address=own.metrics,
        environment={**run.environment(), **environment_of(process.gpus)},
        restart=process.restart,
        leaves=process.leaves,
        security=process.security,
        health=process.health,
        grace_s=process.grace_s,
    )


def fixed(address: str, free: str) -> str:
    """The given address, with the free one's port in place of port 0; the free one where none is given."""
    host, _, port = address.rpartition(":")
    if not address:
        return free
    return f"{host}:{free.rpartition(':')[2]}" if port == "0" else address


def write_atomically(file: Path, text: str) -> None:
    """Readers see the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(file)
