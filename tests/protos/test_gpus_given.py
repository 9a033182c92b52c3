"""A process that works on another GPU than it was given is stopped at its start."""

from __future__ import annotations

import pytest

from protos.gpus import check_given
from tests import fake_nvml  # GPUs GPU-0f to GPU-3f


@pytest.mark.parametrize("shown", ["1,2", "GPU-1f,GPU-2f"])
def test_devices_given_by_number_or_by_uuid_are_those_that_the_driver_means(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    # faults.md 130. torch writes UUIDs without their prefix.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    check_given(["1f", "GPU-2f", ""], nvml=fake_nvml)
    with pytest.raises(ValueError, match=rf"works on GPU 0f, and CUDA_VISIBLE_DEVICES={shown} gives it GPU-1f, GPU-2f: .* set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"):
        check_given(["1f", "0f"], nvml=fake_nvml)


def test_without_the_variable_every_gpu_is_given_and_parts_of_gpus_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_given([f"{number}f" for number in range(4)], nvml=fake_nvml)
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=\(unset\)"):
        check_given(["7f"], nvml=fake_nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    check_given(["7f"], nvml=fake_nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetMigMode", lambda handle: (int(handle == 1), 1), raising=False)
    check_given(["7f"], nvml=fake_nvml)
