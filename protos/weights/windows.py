"""Bytes between a device and the host through two small pinned windows.

A copy between a device and pageable memory is carried out by the driver under its own lock, page faults and all: 256 MiB held up every
launch of the engine (or of a training step) in the same process for 200 ms. A window is a millisecond's work at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

WINDOW_BYTES = 4 << 20


class Windows:
    """For one thread and one device, in the stream that is current when they are used. Example: `for offset, data in windows.to_host(bucket): ...`"""

    def __init__(self, device: torch.device, window_bytes: int = WINDOW_BYTES) -> None:
        on_gpu = device.type == "cuda"
        self._size = window_bytes
        self._buffers = [torch.empty(window_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._done: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in range(2)]  # of the last copy into or out of each

    def to_host(self, data: torch.Tensor) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """(offset, bytes) of a uint8 tensor on the device, in order; each stays valid until the next is asked for."""
        starts = range(0, len(data), self._size)
        for number in range(min(1, len(starts))):
            self._fetch(number, data)
        for number, start in enumerate(starts):
            if number + 1 < len(starts):
                self._fetch(number + 1, data)
            self._await(number)
            yield start, self._buffers[number % 2][: min(self._size, len(data) - start)].numpy()

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """All of `source`, uint8 on the host, into `target` on the device. Returns when the bytes are there."""
        for number, start in enumerate(range(0, len(source), self._size)):
            piece = source[start : start + self._size]
            if number > 1:
                self._await(number)
            window = self._buffers[number % 2][: len(piece)]
            window.copy_(piece)
            target[start : start + len(piece)].copy_(window, non_blocking=True)
            self._record(number)
        for number in range(2):
            self._await(number)

    def _fetch(self, number: int, data: torch.Tensor) -> None:
        piece = data[number * self._size : (number + 1) * self._size]
        self._buffers[number % 2][: len(piece)].copy_(piece, non_blocking=True)
        self._record(number)

    def _record(self, number: int) -> None:
        if (event := self._done[number % 2]) is not None:
            event.record()

    def _await(self, number: int) -> None:
        if (event := self._done[number % 2]) is not None:
            event.synchronize()
