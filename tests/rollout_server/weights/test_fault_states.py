"""Faults at the states around the transfer (test_faults.py has those of the transfer itself), and that no pair of fault and state is left out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import staging
from protos.weights.mirror import Mirror
from rollout_server.weights import driver as driver_module
from rollout_server.weights.driver import CommitError, CommitTimes, UpdateDriver
from rollout_server.weights.fetching import LearnerSource
from rollout_server.weights.transaction import Phase
from tests.rollout_server.weights import test_faults
from tests.rollout_server.weights.faulty import (
    FULL,
    NAMES,
    SILENT_S,
    SIZE,
    LandingEngine,
    attempt,
    content,
    full,
    manifest,
    unchanged,
    with_driver,
)

FAULTS = ("dropped", "flipped", "prefix", "dead", "stalled", "half", "memory")
STATES = ("PREPARED", "RECEIVING", "HELD", "COMMITTING", "FETCHING")
FETCHED = {  # fault of a fetch to what the log must name
    "dropped": [f"1 of 3 buckets are not whole, the first is 1 with {NAMES[1]}"],
    "flipped": [NAMES[1]],
    "prefix": [f"0 of 3 names match; missing: {NAMES[0]}"],
    "dead": [f"ConnectionError: the learner is gone; 2 of 3 buckets are not whole, the first is 1 with {NAMES[1]}"],
    "stalled": ["TimeoutError: it did not end within 1.5 s", "buckets are not whole, the first is", "with model."],
    "half": [f"1 of 3 buckets are not whole, the first is 1 with {NAMES[1]}"],
    "memory": [FULL],
}
NO_BYTES = "no byte has come and nothing is allocated"
VERIFIED = "every byte was verified before; nothing comes any more"
IMPOSSIBLE = {
    **dict.fromkeys(product(("dropped", "flipped", "half", "memory"), ["PREPARED"]), NO_BYTES),
    **dict.fromkeys(product(("dropped", "flipped", "half", "prefix", "memory"), ["HELD"]), VERIFIED),
    **dict.fromkeys(product(("dropped", "flipped", "half", "prefix"), ["COMMITTING"]), VERIFIED),
}


def test_every_fault_is_injected_at_every_state_where_it_can_happen() -> None:
    receiving = {"absent": "dead"} | {fault: fault for fault in FAULTS}
    injected = {(receiving[fault], "RECEIVING") for fault, *_ in test_faults.CASES} | {("prefix", "RECEIVING"), ("memory", "RECEIVING"), ("memory", "COMMITTING")}  # the last three: tests of their own there
    injected |= {("prefix", "PREPARED")}  # the same test: names come with the order to begin
    injected |= {(fault, state) for state in ("PREPARED", "HELD", "COMMITTING") for fault in ("dead", "stalled")} | {(fault, "FETCHING") for fault in FETCHED}
    assert injected | IMPOSSIBLE.keys() == set(product(FAULTS, STATES)) and not injected & IMPOSSIBLE.keys()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


class Learner:
    """FetchWeights of version 2, with a fault the first time."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    async def fetch(self, request: pb.FetchWeightsRequest) -> AsyncIterator[pb.FetchWeightsResponse]:
        fault, self.fault = self.fault, ""
        yield pb.FetchWeightsResponse(manifest=manifest(2, [f"module.{name}" for name in NAMES] if fault == "prefix" else NAMES))
        for bucket in range(len(NAMES)):
            data = bytearray(content(2, bucket).tobytes())
            if bucket == 1 and fault == "dropped":
                continue
            if bucket == 1 and fault == "flipped":
                data[5] ^= 1
            if bucket == 1 and fault == "half":
                del data[SIZE // 2 :]
            if bucket == 1 and fault == "dead":
                raise ConnectionError("the learner is gone")
            if bucket == 1 and fault == "stalled":
                await asyncio.sleep(SILENT_S)
            yield pb.FetchWeightsResponse(chunk=pb.FetchWeightsResponse.Chunk(bucket=bucket, offset=0, data=bytes(data)))


async def reached(engine: LandingEngine, version: int, limit_s: float = 40.0) -> None:
    async with asyncio.timeout(limit_s):
        while engine.loaded_version != version:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", FETCHED)
async def test_a_fault_of_a_fetch_leaves_the_old_version_is_named_and_the_next_fetch_goes_through(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine, allocated = LandingEngine(), staging._allocated
    calls = {"left": 1 if fault == "memory" else 0}

    def once(sizes: list[int], device: torch.device, of: manifest_pb2.Manifest) -> list[torch.Tensor]:
        calls["left"] -= 1
        return (full if calls["left"] == 0 else allocated)(sizes, device, of)

    monkeypatch.setattr(staging, "_allocated", once)

    async def work(driver: UpdateDriver) -> None:
        async with asyncio.timeout(40):
            while not all(words in caplog.text for words in FETCHED[fault]):
                assert unchanged(engine), caplog.text
                await asyncio.sleep(0.01)
        assert not driver.stale and "version 2" in caplog.text
        await reached(engine, 2)
        assert unchanged(engine, 2)

    await with_driver(engine, work, source=LearnerSource(Mirror(tmp_path / "mirror"), Learner(fault).fetch), newest=2, catch_up_s=0.05, receive_timeout_s=1.5)


@pytest.mark.parametrize("fault", ["dead", "stalled"])
async def test_a_learner_lost_or_silent_after_the_order_to_prepare_leaves_the_old_version(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_PREPARED_S", 0.3)
    engine = LandingEngine()

    async def work(driver: UpdateDriver) -> None:
        driver.order(pb.AttendResponse(prepare_update=pb.PrepareUpdate(epoch=2, version=2)))
        assert (await asyncio.wait_for(driver.next_report(), 30)).phase == pb.UPDATE_PHASE_READY and driver.state.phase is Phase.PREPARED
        if fault == "dead":
            driver.detached()
            assert driver.state.phase is Phase.IDLE and unchanged(engine)
            driver.welcome(2)
        await reached(engine, 2)  # it fetches what the epoch never brought
        assert unchanged(engine, 2)

    await with_driver(engine, work, source=LearnerSource(Mirror(tmp_path / "mirror"), Learner().fetch), catch_up_s=0.05)


@pytest.mark.parametrize("fault", ["dead", "stalled"])
async def test_a_learner_lost_while_a_version_is_held_costs_it_and_a_silent_one_does_not(store: dist.TCPStore, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_PREPARED_S", 0.5)
    engine = LandingEngine()

    async def work(driver: UpdateDriver) -> None:
        assert (await attempt(driver, store, 2, manifest(2), hold=True)).phase == pb.UPDATE_PHASE_RECEIVED and unchanged(engine)
        if fault == "dead":
            driver.detached()
            assert driver.state.phase is Phase.IDLE and unchanged(engine)
            driver.welcome(2)
            assert (await attempt(driver, store, 3, manifest(3))).phase == pb.UPDATE_PHASE_LOADED and unchanged(engine, 3)
        else:
            assert (await asyncio.wait_for(driver.next_report(), 30)).phase == pb.UPDATE_PHASE_LOADED and unchanged(engine, 2)

    await with_driver(engine, work)


class Lost(LandingEngine):
    """Its commit dies under it, or never ends, as long as `fault_of` says so."""

    fault_of = ""

    async def commit(self, version: int) -> CommitTimes:
        if self.fault_of == "dead":
            raise CommitError(f"version {version} failed after pause: EngineUnavailableError: the engine's process died")
        if self.fault_of == "stalled":
            await asyncio.sleep(SILENT_S)
        return await super().commit(version)


@pytest.mark.parametrize(("fault", "named"), [("dead", "the engine's process died"), ("stalled", "TimeoutError: version 2 was not applied within 2 s")])
async def test_an_engine_lost_or_silent_while_committing_is_stale_until_a_full_update(store: dist.TCPStore, fault: str, named: str) -> None:
    engine = Lost()
    engine.fault_of = fault

    async def work(driver: UpdateDriver) -> None:
        began = time.monotonic()
        report = await attempt(driver, store, 2, manifest(2))
        assert report.phase == pb.UPDATE_PHASE_FAILED and named in report.detail and driver.stale and engine.loaded_version == 1
        assert time.monotonic() - began < 40
        engine.fault_of = ""
        assert (await attempt(driver, store, 3, manifest(3))).phase == pb.UPDATE_PHASE_LOADED and not driver.stale and unchanged(engine, 3)

    await with_driver(engine, work, receive_timeout_s=2.0)
