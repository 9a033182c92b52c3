"""A connection to a Ray cluster: one that is there, or one that is started on this machine and ends with the block.

A cluster of this machine has as many raylets as it is to have nodes, each with a loopback address of its own: 127.0.0.2, 127.0.0.3, ...
`ray start` leaves its processes behind when it is killed, so a guardian (guardian.py) holds each node and ends it when this process is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray

from deploy.doctor.run_file import why_no_answer

log = logging.getLogger("headrace.deploy.on_ray.cluster")
GUARDIAN = Path(__file__).with_name("guardian.py")
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes: nothing of ours lies there
START_S = 180.0
# A raylet of this machine that does not answer for so long is lost; Ray's own setting, for networks, takes half a minute.
WATCHFUL = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "5", "RAY_health_check_initial_delay_ms": "5000"}
# Every raylet here counts the memory of the whole machine, and would kill services because of what others take of it; a service is no more to be killed by
# the kernel than under `local`.
OWN_MEMORY = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_oom_score_adjustment": "0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One raylet of this machine. Example: `Node(ip="127.0.0.3", num_cpus=8)`"""

    ip: str
    num_cpus: int = 8  # logical
    num_gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """To a cluster that is there: host:port, or "auto" for the one that this machine belongs to. Raises ValueError when none answers."""
    if ":" in address and "://" not in address and (why := why_no_answer(address)):  # Ray itself asks for minutes, and ends the process
        raise ValueError(f"cluster.ray.address={address}: nothing answers there ({why}): start a cluster (`ray start --head`), or leave address out to have one started here")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, include_dashboard=False)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise ValueError(f"cluster.ray.address={address}: no Ray cluster answers ({str(error).splitlines()[0]}): start one (`ray start --head`), or leave address out to have one started here") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def started(nodes: Sequence[Node]) -> Iterator[dict[str, int]]:
    """Starts a cluster of this machine and connects to its first node; process ids of the raylets by ip. Raises RuntimeError when Ray does not come up."""
    folder = Path(tempfile.mkdtemp(prefix="hr-ray-"))  # short: sockets lie below it, and their paths may have 107 bytes
    port = _free_port(nodes[0].ip)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for index, node in enumerate(nodes):
            stack.enter_context(_node(node, folder, port, nodes[0].ip if index else ""))
        _until_alive(nodes[0].ip, port)
        ray.init(address=f"{nodes[0].ip}:{port}", _node_ip_address=nodes[0].ip, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, include_dashboard=False)
        stack.callback(ray.shutdown)
        _until_joined(len(nodes), folder)
        yield raylets(folder)


def raylets(folder: Path) -> dict[str, int]:
    """Process ids of the raylets whose sockets lie below the folder, by ip."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().decode(errors="replace").split("\0")
            if words[0].endswith("/raylet") and any(str(folder) in word for word in words):
                ip = next(word.partition("=")[2] for word in words if word.startswith("--node_ip_address="))
                found[ip] = int(entry.parent.name)
    return found


@contextmanager
def _node(node: Node, folder: Path, port: int, head: str) -> Iterator[None]:
    """head: ip of the first node; empty: this is the first."""
    place = ["--address", f"{head}:{port}"] if head else [
        "--head", "--port", str(port), "--temp-dir", str(folder), "--include-dashboard", "false", "--ray-client-server-port", str(_free_port(node.ip)),
    ]  # fmt: skip
    command = [
        sys.executable, str(GUARDIAN), sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place,
        "--node-ip-address", node.ip, "--num-cpus", str(node.num_cpus), "--num-gpus", str(node.num_gpus), "--resources", json.dumps(dict(node.resources)),
        "--object-store-memory", str(OBJECT_STORE_BYTES), "--dashboard-agent-listen-port", str(_free_port(node.ip)), "--disable-usage-stats",
    ]  # fmt: skip
    with (folder / f"{node.ip}.log").open("ab") as output:
        guardian = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env={**os.environ, **WATCHFUL, **OWN_MEMORY}, start_new_session=True)
    try:
        yield
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(30)


def _until_alive(ip: str, port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection((ip, port), timeout=1).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"Ray did not come up on {ip}:{port} within {START_S:.0f} s")


def _until_joined(count: int, folder: Path) -> None:
    end = time.monotonic() + START_S
    while sum(bool(node["Alive"]) for node in ray.nodes()) < count:
        if time.monotonic() > end:
            logs = "\n".join(file.read_text(errors="replace")[-500:] for file in sorted(folder.glob("*.log")))
            raise RuntimeError(f"of {count} nodes only {len(ray.nodes())} joined the Ray cluster within {START_S:.0f} s:\n{logs}")
        time.sleep(0.2)


def _free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])
