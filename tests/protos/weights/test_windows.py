"""Windows over host memory in place of a device's: every byte passes once and in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protos.weights.staging import digest, digests_of
from protos.weights.windows import Windows


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 37])
def test_both_ways_bring_every_byte_whatever_the_last_window_holds(size: int) -> None:
    windows, data = Windows(torch.device("cpu"), window_bytes=10), torch.arange(size, dtype=torch.uint8)
    found = [(offset, window.tolist()) for offset, window in windows.to_host(data)]
    assert [offset for offset, _ in found] == list(range(0, size, 10)) and [byte for _, window in found for byte in window] == list(range(size))
    target = torch.full((size,), 255, dtype=torch.uint8)
    windows.to_device(data, target)
    assert torch.equal(target, data)


def test_a_window_s_bytes_stand_until_the_next_is_asked_for() -> None:
    seen = []
    for _, window in Windows(torch.device("cpu"), window_bytes=4).to_host(torch.arange(12, dtype=torch.uint8)):
        seen.append(window.tolist())
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("sizes", [[37], [10, 10, 17], [1, 8, 1, 27], [9, 2, 9, 17], [3, 30, 4], [10, 0, 27, 0]])
def test_digests_of_runs_that_cross_windows_are_those_of_the_runs(sizes: list[int]) -> None:
    data = np.random.default_rng(1).integers(0, 256, 37, dtype=np.uint8)
    expected, at = [], 0
    for size in sizes:
        expected.append(digest(data[at : at + size]))
        at += size
    assert digests_of(Windows(torch.device("cpu"), window_bytes=10).to_host(torch.from_numpy(data)), sizes) == expected


class Device:
    """Copies are done when they are waited for, as a device may take until then; what is read before is whatever lies there."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def event(self) -> Event:
        return Event(self)


class Event:
    """Stands for the copies that were launched before `record`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.mine: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self) -> None:
        self.mine = list(self.device.pending)

    def synchronize(self) -> None:
        for copy in [copy for copy in self.device.pending if any(copy is mine for mine in self.mine)]:
            copy[0].copy_(copy[1])
            self.device.pending = [other for other in self.device.pending if other is not copy]
        self.mine = []


def late(monkeypatch: pytest.MonkeyPatch) -> Windows:
    """Windows of 4 bytes on a device that copies late."""
    device, windows, copy = Device(), Windows(torch.device("cpu"), window_bytes=4), torch.Tensor.copy_

    def copies(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(target, source)
        device.pending.append((target, source))
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    windows._done = [device.event(), device.event()]
    return windows


def test_bytes_from_a_device_are_handed_out_only_once_their_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, data = late(monkeypatch), torch.arange(18, dtype=torch.uint8)
    assert [byte for _, window in windows.to_host(data) for byte in window.tolist()] == list(range(18))


def test_a_window_is_filled_again_only_once_the_device_has_taken_what_was_in_it_and_all_is_there_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, target = late(monkeypatch), torch.full((18,), 255, dtype=torch.uint8)
    windows.to_device(torch.arange(18, dtype=torch.uint8), target)
    assert target.tolist() == list(range(18))
