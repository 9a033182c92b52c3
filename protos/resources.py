"""What a process and its GPUs use, as the kernel and NVML tell. NVML is there with the extra `gpu-metrics` (or vLLM for GPUs) and a driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from protos.exporting import Figure
from protos.processes import descendants, resident_bytes

logger = logging.getLogger("headrace.metrics")
State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU now. Example: `Gpu(index="0", uuid="GPU-5f", use=0.93, memory_used_bytes=1 << 36, memory_bytes=1 << 37, power_w=610.0)`"""

    index: str  # NVML's, which CUDA_VISIBLE_DEVICES names too
    uuid: str
    use: float  # share of the last moments in which a kernel ran, 0 to 1
    memory_used_bytes: int
    memory_bytes: int
    power_w: float


def memory_bytes() -> dict[str, float]:
    """Resident memory of this process, and of all below it together."""
    me = os.getpid()
    return {"service": resident_bytes(me), "children": sum(map(resident_bytes, descendants(me)))}


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


class Gpus:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES), read through NVML; none where NVML is not there."""

    def __init__(self, nvml: Any | None = None, visible: str | None = None) -> None:
        """nvml, visible: for tests; None: the real library, and this process's environment."""
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._nvml = nvml if nvml is not None else _nvml()
        self._handles = list(self._found()) if self._nvml is not None else []

    def __len__(self) -> int:
        return len(self._handles)

    def _found(self) -> Iterator[tuple[str, str, Any]]:
        nvml: Any = self._nvml
        wanted = None if self._visible is None else [part.strip() for part in self._visible.split(",") if part.strip()]
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            if wanted is None or str(index) in wanted or any(uuid.startswith(part) for part in wanted if part.startswith("GPU-")):
                yield str(index), uuid, handle

    def now(self) -> list[Gpu]:
        """Each GPU; one that does not answer is left out."""
        return [gpu for index, uuid, handle in self._handles if (gpu := self._read(index, uuid, handle)) is not None]

    def _read(self, index: str, uuid: str, handle: Any) -> Gpu | None:
        nvml: Any = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return Gpu(
                index=index, uuid=uuid, use=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, memory_used_bytes=memory.used,
                memory_bytes=memory.total, power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            )  # fmt: skip
        except nvml.NVMLError as error:
            logger.debug("GPU %s does not answer: %s", index, error)
            return None


def _nvml() -> Any | None:
    """The library, ready; None where it, or a driver, is not there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def resource_figures(service: str, gpus: Callable[[State], Gpus]) -> tuple[Figure[State], ...]:
    """The figures that every service has, named for it."""

    def of_gpus(read: Callable[[Gpu], float]) -> Callable[[State], dict[tuple[str, str], float | None]]:
        return lambda state: {(gpu.index, gpu.uuid): read(gpu) for gpu in gpus(state).now()}

    labels = ("gpu", "uuid")
    return (
        Figure(name=f"headrace_{service}_memory_bytes", kind="gauge", labels=("process",), text="Resident memory of the service, and of all processes below it.", read=lambda _: memory_bytes()),
        Figure(name=f"headrace_{service}_open_files", kind="gauge", text="File descriptors of the service.", read=lambda _: open_files()),
        Figure(name=f"headrace_{service}_cpu_seconds_total", kind="counter", text="Processor time of the service, without processes below it.", read=lambda _: sum(os.times()[:2])),
        Figure(name=f"headrace_{service}_gpu_use_ratio", kind="gauge", labels=labels, text="Share of the last moments in which the GPU ran a kernel.", read=of_gpus(lambda gpu: gpu.use)),
        Figure(name=f"headrace_{service}_gpu_used_bytes", kind="gauge", labels=labels, text="Memory of the GPU in use, by whomever.", read=of_gpus(lambda gpu: gpu.memory_used_bytes)),
        Figure(name=f"headrace_{service}_gpu_size_bytes", kind="gauge", labels=labels, text="Memory of the GPU.", read=of_gpus(lambda gpu: gpu.memory_bytes)),
        Figure(name=f"headrace_{service}_gpu_power_watts", kind="gauge", labels=labels, text="Power that the GPU draws.", read=of_gpus(lambda gpu: gpu.power_w)),
    )
