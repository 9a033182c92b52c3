"""A run file: whether it is valid, its addresses are free or answer, and what it names is there."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from deploy import uses
from deploy.doctor import named_files
from deploy.doctor.machine import MIN_FREE_BYTES, of_disk, probe
from deploy.lines import lines_of, located
from deploy.mistakes import Mistakes
from deploy.schema import RunFile, load

CONNECT_S = 3.0


def findings(path: Path) -> Iterator[str]:
    """One line each. A file that is not valid is not looked at further."""
    try:
        run = load(path)
    except Mistakes as mistakes:
        yield from mistakes.lines
        return
    yield from _addresses(run)
    yield from named_findings(run, path)
    yield from network_findings(run)
    yield from _disk(run)


def named_findings(run: RunFile, path: Path) -> list[str]:
    """Of models, files and code that the file names; each line begins with the file and the key's place in it."""
    lines = lines_of(path.read_text())
    found = [*named_files.findings(run), *uses.mistakes(run)]
    return [located(f"{path}: {line}", str(path), lines) for line in found]


def not_looked_at(run: RunFile) -> list[str]:
    """What cannot be known before services start, or not on this machine."""
    return [*named_files.not_looked_at(run), *uses.not_looked_at(run)]


def not_looked_at_of(path: Path) -> list[str]:
    """The same of a file; empty for one that is not valid."""
    try:
        return not_looked_at(load(path))
    except Mistakes:
        return []


def _addresses(run: RunFile) -> Iterator[str]:
    listening = {
        "learner.metrics_address": run.learner.metrics_address, "rollout.metrics_address": run.rollout.metrics_address, "rollout.openai.address": run.rollout.openai.address,
        "reward.metrics_address": run.reward.metrics_address if run.reward else "",
    }  # fmt: skip
    if "address" in run.learner.model_fields_set:
        listening["learner.address"] = run.learner.address
    for key, address in listening.items():
        if address and (why := why_not_free(address)):
            yield f"{key}={address}: cannot be listened on ({why}): end what holds it (ss -ltnp), or use another port"
    for address in run.rollout.rewards:
        if why := why_no_answer(address):
            yield f"rollout.rewards: {address} does not answer ({why}): start that reward server, or correct the address"


def network_findings(run: RunFile, system: Path = Path("/sys/class")) -> Iterator[str]:
    """Of `cluster.communication`, against the network cards of this machine. system: where the kernel lists them."""
    said = run.cluster.communication if run.cluster else None
    if said is None:
        return
    if said.interface and not (system / "net" / said.interface).exists():
        there = sorted(each.name for each in (system / "net").iterdir()) if (system / "net").is_dir() else []
        yield f"cluster.communication.interface={said.interface}: this machine has {', '.join(there) or 'none'}: NCCL and gloo would find no way to the others; name one of these"
    if said.rdma_enabled:
        states = [file.read_text().strip() for file in sorted((system / "infiniband").glob("*/ports/*/state"))]
        if not any("ACTIVE" in state for state in states):
            found = f"ports are {', '.join(states)}" if states else f"{system / 'infiniband'} lists no device"
            yield f"cluster.communication.rdma_enabled=true: no RDMA port of this machine is active ({found}): load the driver, see to the cable, or set rdma_enabled: false, which is slower"


def _disk(run: RunFile) -> Iterator[str]:
    """Of the disk that the run folder is to lie on: room, speed, clock."""
    folder = next((each for each in (run.run_dir, *run.run_dir.absolute().parents) if each.is_dir()), None)
    if folder is None or named_files.why_not_made(folder):
        return  # said already
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        yield f"run_dir={run.run_dir}: {free >> 20} MiB are free on its disk, journal and checkpoints need {MIN_FREE_BYTES >> 20} MiB or more: make room, or put run_dir elsewhere"
    yield from of_disk(probe(folder), f"run_dir={run.run_dir}: its disk")


def why_not_free(address: str) -> str:
    """Why nobody could listen there; empty: somebody could."""
    host, port = _parts(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def why_no_answer(address: str) -> str:
    """Why no connection comes about; empty: one does."""
    try:
        with socket.create_connection(_parts(address), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
