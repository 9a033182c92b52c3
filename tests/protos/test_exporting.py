"""Figures are read on the loop at a scrape, and told over HTTP only to whom may have them."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from protos.exporting import Exporter, Figure
from protos.gpus import Gpus
from protos.resources import memory_bytes
from protos.security import Security
from tests import fake_nvml

FIGURES: tuple[Figure[dict[str, Any]], ...] = (
    Figure(name="headrace_some_tokens_total", kind="counter", text="Tokens.", read=lambda s: s["tokens"]),
    Figure(name="headrace_some_groups", kind="gauge", labels=("state",), text="Groups.", read=lambda s: s["groups"]),
    Figure(name="headrace_some_calls", kind="gauge", labels=("a", "b"), text="Calls.", read=lambda s: {("x", 1): 2.5, ("y", 2): None}),
    Figure(name="headrace_some_use_ratio", kind="gauge", text="Use.", read=lambda s: None),
)


def get(port: int, token: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
    return urllib.request.urlopen(request, timeout=10).read().decode()


async def test_a_scrape_tells_the_state_of_its_moment() -> None:
    state = {"tokens": 3, "groups": {"open": 1}, "thread": None}
    here = threading.get_ident()
    watched: Figure[dict[str, Any]] = Figure(name="headrace_some_thread", kind="gauge", text="Whether it is read on the loop.", read=lambda s: float(threading.get_ident() == here))
    exporter: Exporter[dict[str, Any]] = Exporter("127.0.0.1:0", (*FIGURES, watched), state)
    await exporter.start()
    try:
        first = (await asyncio.to_thread(get, exporter.port)).splitlines()
        assert 'headrace_some_groups{state="open"} 1.0' in first and "headrace_some_tokens_total 3.0" in first
        assert 'headrace_some_calls{a="x",b="1"} 2.5' in first
        assert not [line for line in first if line.startswith(('headrace_some_calls{a="y"', "headrace_some_use_ratio "))]  # None: nothing to tell
        assert "# TYPE headrace_some_use_ratio gauge" in first
        assert "headrace_some_thread 1.0" in first
        state["tokens"] = 4
        assert "headrace_some_tokens_total 4.0" in await asyncio.to_thread(get, exporter.port)
    finally:
        await exporter.stop()


async def test_the_token_is_asked_for() -> None:
    exporter: Exporter[dict[str, Any]] = Exporter("127.0.0.1:0", FIGURES, {"tokens": 3, "groups": {}}, Security(token="open-sesame", certificate=None, key=None, ca=None))
    await exporter.start()
    try:
        for token in ("", "open"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                await asyncio.to_thread(get, exporter.port, token)
        assert "headrace_some_tokens_total 3.0" in await asyncio.to_thread(get, exporter.port, "open-sesame")
    finally:
        await exporter.stop()


async def test_an_address_in_use_is_named() -> None:
    first: Exporter[dict[str, Any]] = Exporter("127.0.0.1:0", (), {})
    await first.start()
    try:
        with pytest.raises(ValueError) as raised:
            await Exporter(f"127.0.0.1:{first.port}", (), {}).start()
        assert str(raised.value) == f"metrics_address=127.0.0.1:{first.port} cannot be listened on: Address already in use; choose another port, or leave it empty"
    finally:
        await first.stop()


@pytest.mark.parametrize(("visible", "indices"), [("1", ["1"]), ("GPU-0f,GPU-1f", ["0", "1"]), ("0,3", ["0"]), ("", [])])
def test_gpus_are_those_the_process_may_use_and_that_answer(visible: str, indices: list[str]) -> None:
    found = Gpus(nvml=fake_nvml, visible=visible).now()
    assert [gpu.index for gpu in found] == indices
    assert all((gpu.use, gpu.memory_used_bytes, gpu.power_w) == ((80 + int(gpu.index)) / 100, (100 + int(gpu.index)) << 20, 250.0) for gpu in found)


def test_traffic_is_told_in_bytes_where_the_gpu_tells_it() -> None:
    first, second = Gpus(nvml=fake_nvml, visible="0,1").now()
    assert first.pcie_bytes_per_s is None and first.nvlink_bytes is None
    assert second.pcie_bytes_per_s == (1_000_000.0, 1_001_000.0)  # 1000 and 1001 KB
    assert second.nvlink_bytes is not None
    sent, received = second.nvlink_bytes
    assert sent % (8 * 1024) == 0 and received * 8 == sent * 9  # fields 138 and 139: 8 and 9 KiB a second


def test_the_stand_in_is_used_only_when_it_is_named_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HEADRACE_TEST_NVML", "tests.fake_nvml")
    gpus, end_s = Gpus(visible="2"), time.monotonic() + 20
    while not gpus.now() and time.monotonic() < end_s:  # read in a thread
        time.sleep(0.01)
    assert [gpu.uuid for gpu in gpus.now()] == ["GPU-2f"] and "made up" in caplog.text


def test_memory_is_that_of_the_process() -> None:
    assert 1 << 20 < memory_bytes()["service"] < 1 << 36
