"""The figures that every service has: what its process and its GPUs use, as the kernel and NVML tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from protos.exporting import Figure
from protos.gpus import Gpu, Gpus
from protos.processes import descendants, resident_bytes

State = TypeVar("State")


def memory_bytes() -> dict[str, float]:
    """Resident memory of this process, and of all below it together."""
    me = os.getpid()
    return {"service": resident_bytes(me), "children": sum(map(resident_bytes, descendants(me)))}


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def resource_figures(service: str, gpus: Callable[[State], Gpus]) -> tuple[Figure[State], ...]:
    """The figures that every service has, named for it."""

    def of_gpus(read: Callable[[Gpu], float]) -> Callable[[State], dict[tuple[str, str], float | None]]:
        return lambda state: {(gpu.index, gpu.uuid): read(gpu) for gpu in gpus(state).now()}

    def both_ways(read: Callable[[Gpu], tuple[float, float] | None]) -> Callable[[State], dict[tuple[str, str, str], float | None]]:
        return lambda state: {(gpu.index, gpu.uuid, way): value for gpu in gpus(state).now() if (found := read(gpu)) is not None for way, value in zip(("sent", "received"), found, strict=True)}

    labels = ("gpu", "uuid")
    return (
        Figure(name=f"headrace_{service}_memory_bytes", kind="gauge", labels=("process",), text="Resident memory of the service, and of all processes below it.", read=lambda _: memory_bytes()),
        Figure(name=f"headrace_{service}_open_files", kind="gauge", text="File descriptors of the service.", read=lambda _: open_files()),
        Figure(name=f"headrace_{service}_cpu_seconds_total", kind="counter", text="Processor time of the service, without processes below it.", read=lambda _: sum(os.times()[:2])),
        Figure(name=f"headrace_{service}_gpu_use_ratio", kind="gauge", labels=labels, text="Share of the last moments in which the GPU ran a kernel.", read=of_gpus(lambda gpu: gpu.use)),
        Figure(name=f"headrace_{service}_gpu_used_bytes", kind="gauge", labels=labels, text="Memory of the GPU in use, by whomever.", read=of_gpus(lambda gpu: gpu.memory_used_bytes)),
        Figure(name=f"headrace_{service}_gpu_size_bytes", kind="gauge", labels=labels, text="Memory of the GPU.", read=of_gpus(lambda gpu: gpu.memory_bytes)),
        Figure(name=f"headrace_{service}_gpu_power_watts", kind="gauge", labels=labels, text="Power that the GPU draws.", read=of_gpus(lambda gpu: gpu.power_w)),
        Figure(name=f"headrace_{service}_gpu_pcie_bytes_per_second", kind="gauge", labels=(*labels, "way"), text="PCIe traffic of the GPU over the last 20 ms: sent, received.", read=both_ways(lambda gpu: gpu.pcie_bytes_per_s)),
        Figure(name=f"headrace_{service}_gpu_nvlink_bytes_total", kind="counter", labels=(*labels, "way"), text="NVLink traffic of the GPU over all its links since the driver was loaded: sent, received.", read=both_ways(lambda gpu: gpu.nvlink_bytes)),
    )
