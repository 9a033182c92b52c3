"""Each fault of a transfer, injected at each of its stages, through the real driver, landing and gloo groups.

Whatever happens, the replica ends within the deadline on the old version, or STALE where weights were touched, and says which tensor or
which peer is to blame; the next update goes through.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.weights import staging
from rollout_server.weights.driver import UpdateDriver
from tests.rollout_server.weights.faulty import (
    DEADLINE_S,
    FULL,
    NAMES,
    LandingEngine,
    attempt,
    full,
    manifest,
    raising,
    unchanged,
    with_driver,
)

FIRST, MIDDLE, LAST = 0, 1, 2
REPLICA = "this is rank 1 (receiver 1 (replica-a))"
CASES = [
    # fault, before which bucket, what the report must name: the tensor (before the first byte the peer), and with a lost peer who is who
    ("absent", FIRST, ["trainer rank 0 did not appear in time", REPLICA]),
    *(("dead", at, ["its peers are trainer rank 0", REPLICA]) for at in (FIRST, MIDDLE, LAST)),
    *(("stalled", at, ["its peers are trainer rank 0", REPLICA, NAMES[at]]) for at in (FIRST, MIDDLE, LAST)),
    *(("flipped", at, [NAMES[at]]) for at in (FIRST, MIDDLE, LAST)),
    *(("dropped", at, [NAMES[at]]) for at in (FIRST, MIDDLE, LAST)),
    *(("half", at, [NAMES[at]]) for at in (FIRST, MIDDLE, LAST)),  # gloo takes a shorter message; its digest does not
]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.mark.parametrize(("fault", "at", "blamed"), CASES)
async def test_a_fault_on_the_way_leaves_the_old_version_names_its_cause_and_the_next_update_goes_through(store: dist.TCPStore, fault: str, at: int, blamed: list[str]) -> None:
    engine = LandingEngine()

    async def work(driver: UpdateDriver) -> None:
        began = time.monotonic()
        report = await attempt(driver, store, 2, manifest(2), fault, at)
        assert report.phase == pb.UPDATE_PHASE_FAILED and all(words in report.detail for words in blamed), report.detail
        if fault == "dead" and at:  # what it sent last may be lost with it; before the first bucket there is only the peer
            assert any(name in report.detail for name in NAMES[max(0, at - 1) : at + 1]), report.detail
        assert time.monotonic() - began < DEADLINE_S
        assert not driver.stale and unchanged(engine)
        assert (await attempt(driver, store, 3, manifest(3))).phase == pb.UPDATE_PHASE_LOADED
        assert unchanged(engine, 3)

    await with_driver(engine, work)


@pytest.mark.parametrize(
    ("names", "blamed"),
    [
        ([f"module.{name}" for name in NAMES], "0 of 3 names match"),  # faults.md 6
        (NAMES[:2], "missing: model.norm.weight"),
        ([*NAMES, "model.extra"], "unknown: model.extra"),
    ],
)
async def test_other_names_than_the_model_s_are_refused_before_any_byte_moves(store: dist.TCPStore, names: list[str], blamed: str) -> None:
    engine = LandingEngine()

    async def work(driver: UpdateDriver) -> None:
        report = await attempt(driver, store, 2, manifest(2, names), "absent")
        assert report.phase == pb.UPDATE_PHASE_FAILED and blamed in report.detail and engine.loaded_version == 1

    await with_driver(engine, work)


async def test_no_memory_for_staging_leaves_the_old_version(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LandingEngine()

    async def work(driver: UpdateDriver) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "_allocated", full)
            report = await attempt(driver, store, 2, manifest(2), "absent")
        assert FULL in report.detail and not driver.stale and engine.loaded_version == 1
        assert (await attempt(driver, store, 3, manifest(3))).phase == pb.UPDATE_PHASE_LOADED

    await with_driver(engine, work)


async def test_a_commit_refused_before_the_weights_are_touched_leaves_the_old_version(store: dist.TCPStore) -> None:
    engine = LandingEngine()
    engine.fault = raising(RuntimeError("paused by somebody else"), at="take")

    async def work(driver: UpdateDriver) -> None:
        report = await attempt(driver, store, 2, manifest(2))
        assert report.phase == pb.UPDATE_PHASE_FAILED and "paused by somebody else" in report.detail and not driver.stale and engine.loaded_version == 1

    await with_driver(engine, work)


@pytest.mark.parametrize("at", NAMES)
async def test_no_memory_while_applying_is_stale_names_the_tensor_and_is_mended_by_the_next_full_update(store: dist.TCPStore, at: str) -> None:
    engine = LandingEngine()
    engine.fault = raising(MemoryError(), at=at)

    async def work(driver: UpdateDriver) -> None:
        report = await attempt(driver, store, 2, manifest(2))
        assert report.phase == pb.UPDATE_PHASE_FAILED and at in report.detail and driver.stale and engine.loaded_version == 1
        engine.fault = raising(MemoryError(), at="")
        assert (await attempt(driver, store, 3, manifest(3))).phase == pb.UPDATE_PHASE_LOADED and not driver.stale

    await with_driver(engine, work)

