"""GPUs as NVML tells of them. NVML is there with the extra `gpu-metrics` (or vLLM for GPUs) and a driver."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("headrace.metrics")
TEST_NVML = "HEADRACE_TEST_NVML"  # names a Python module that stands in for NVML, for tests of what needs a GPU; never set in a real run
EVERY_S = 1.0  # between two looks; PCIe traffic alone takes NVML 20 ms a direction
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_FIELDS = (138, 139)  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, in KiB since the driver was loaded
_PCIE_COUNTERS = (0, 1)  # NVML_PCIE_UTIL_TX_BYTES and _RX_BYTES, in KB a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU now. Example: `Gpu(index="0", uuid="GPU-5f", use=0.93, memory_used_bytes=1 << 36, memory_bytes=1 << 37, power_w=610.0)`"""

    index: str  # NVML's, which CUDA_VISIBLE_DEVICES names too
    uuid: str
    use: float  # share of the last moments in which a kernel ran, 0 to 1
    memory_used_bytes: int
    memory_bytes: int
    power_w: float
    pcie_bytes_per_s: tuple[float, float] | None = None  # sent, received; None: it does not tell
    nvlink_bytes: tuple[int, int] | None = None  # sent, received over all links since the driver was loaded; None: it has none, or does not tell


class Gpus:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES), read through NVML; none where NVML is not there.

    The real library is asked in a thread of its own, so that `now` costs nothing.
    """

    def __init__(self, nvml: Any | None = None, visible: str | None = None) -> None:
        """nvml, visible: for tests, and then read in `now`; None: the real library, and this process's environment."""
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._nvml = nvml if nvml is not None else _nvml()
        self._handles = list(self._found()) if self._nvml is not None else []
        self._latest: list[Gpu] | None = None  # None: nobody reads in the background
        if nvml is None and self._handles:
            self._latest = []
            threading.Thread(target=self._keep_reading, name="nvml", daemon=True).start()

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def uuids(self) -> list[str]:
        """As NVML writes them."""
        return [uuid for _, uuid, _ in self._handles]

    @property
    def are_in_parts(self) -> bool:
        """Whether one of them is given away in parts (MIG), which have UUIDs of their own."""
        try:
            return any(self._nvml.nvmlDeviceGetMigMode(handle)[0] == 1 for _, _, handle in self._handles)  # type: ignore[union-attr]  # without the library there are no handles
        except (AttributeError, self._nvml.NVMLError):  # type: ignore[union-attr]  # an old library, or a GPU that has no parts
            return False

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
        return self._read_all() if self._latest is None else self._latest

    def _keep_reading(self) -> None:
        while True:
            self._latest = self._read_all()
            time.sleep(EVERY_S)

    def _read_all(self) -> list[Gpu]:
        return [gpu for index, uuid, handle in self._handles if (gpu := self._read(index, uuid, handle)) is not None]

    def _read(self, index: str, uuid: str, handle: Any) -> Gpu | None:
        nvml: Any = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return Gpu(
                index=index, uuid=uuid, use=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, memory_used_bytes=memory.used,
                memory_bytes=memory.total, power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000, pcie_bytes_per_s=self._pcie(handle), nvlink_bytes=self._nvlink(handle),
            )  # fmt: skip
        except nvml.NVMLError as error:
            logger.debug("GPU %s does not answer: %s", index, error)
            return None

    def _pcie(self, handle: Any) -> tuple[float, float] | None:
        nvml: Any = self._nvml
        try:
            sent, received = (1000.0 * nvml.nvmlDeviceGetPcieThroughput(handle, counter) for counter in _PCIE_COUNTERS)
        except nvml.NVMLError:
            return None
        return sent, received

    def _nvlink(self, handle: Any) -> tuple[int, int] | None:
        nvml: Any = self._nvml
        try:
            values = nvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS) for field in _NVLINK_FIELDS])
        except nvml.NVMLError:
            return None
        if any(value.nvmlReturn != 0 for value in values):
            return None
        sent, received = (1024 * int(value.value.ullVal) for value in values)
        return sent, received


def check_given(used: Iterable[str], nvml: Any | None = None) -> None:
    """Holds the GPUs that a process found itself on (UUIDs, "" for none) against those that CUDA_VISIBLE_DEVICES gives it.

    Raises ValueError for one that it was not given. Where NVML is not there, or parts of GPUs are given away (MIG), nothing is known and nothing is said.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    library = nvml if nvml is not None else _nvml()
    gpus = Gpus(library) if library is not None and "MIG-" not in (shown or "") else None
    given = gpus.uuids if gpus is not None and not gpus.are_in_parts else []
    bare = {uuid.removeprefix("GPU-") for uuid in given}
    strange = sorted({uuid for uuid in used if uuid and uuid.removeprefix("GPU-") not in bare})
    if given and strange:
        raise ValueError(
            f"this process works on GPU {', '.join(strange)}, and CUDA_VISIBLE_DEVICES={shown if shown is not None else '(unset)'} gives it {', '.join(given)}: another program "
            "changed it, or CUDA counts in another order than the driver; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
        )


def _nvml() -> Any | None:
    """The library, ready; None where it, or a driver, is not there."""
    if name := os.environ.get(TEST_NVML, ""):
        logger.warning("%s=%s: what this process tells of GPUs is made up, for a test", TEST_NVML, name)
        return importlib.import_module(name)
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
