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
