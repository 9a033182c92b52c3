"""A thread's own way onto a device beside an engine's or a trainer's steps: one stream and two pinned windows, kept from update to update.

torch's allocator keeps memory by the stream that was current when it was allocated. What is allocated on a stream of one's own comes out of
that stream's memory: after the first update without a call of the driver (which would hold up every launch of the process), and never
memory that another stream's kernels, given back by the interpreter but not yet run, still write to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from protos.weights.windows import Windows


class Side:
    """Used by one thread at a time. On a CPU there is no stream and nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._windows: Windows | None = None

    @property
    def windows(self) -> Windows:
        """Made when first asked for: pinned memory costs a call of the driver."""
        if self._windows is None:
            self._windows = Windows(self.device)
        return self._windows

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host's tensor on the device, through the windows; one that lies there, or has no device to go to, as it is."""
        if self.device.type != "cuda" or tensor.device.type != "cpu":
            return tensor
        source = tensor.contiguous()
        target = torch.empty_like(source, device=self.device)
        self.windows.to_device(source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8))
        return target

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is allocated and launched inside waits for nothing but itself, and is done afterwards."""
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
