"""A made-up NVML of four GPUs, the last of which does not answer: in place of the library by HEADRACE_TEST_NVML=tests.fake_nvml."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

_STARTED_S = time.monotonic()


class NVMLError(Exception):
    """As NVML's."""


def nvmlDeviceGetCount() -> int:
    return 4


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> bytes:
    return f"GPU-{handle}f".encode()


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    if handle == 3:
        raise NVMLError("lost")
    return SimpleNamespace(used=(100 + handle) << 20, total=1000 << 20)


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return SimpleNamespace(gpu=80 + handle)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 250_000


def nvmlDeviceGetPcieThroughput(handle: int, counter: int) -> int:
    """KB a second; the first GPU does not tell."""
    if handle == 0:
        raise NVMLError("not supported")
    return 1000 * handle + counter


def nvmlDeviceGetFieldValues(handle: int, fields: list[tuple[int, int]]) -> list[Any]:
    """KiB, more each second; the first GPU has no NVLink."""
    assert all(scope == 0xFFFFFFFF for _, scope in fields)
    grown = int(time.monotonic() - _STARTED_S)
    return [SimpleNamespace(nvmlReturn=3 if handle == 0 else 0, value=SimpleNamespace(ullVal=(field - 130) * (1 + grown))) for field, _ in fields]
