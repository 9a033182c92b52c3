"""Each fault of a transfer, injected at each of its stages, through the real driver, landing and gloo groups.

Whatever happens, the replica ends within the deadline on the old version, or STALE where weights were touched, and says which tensor or
which peer is to blame; the next update goes through.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import staging
from protos.weights.errors import TransferError
from protos.weights.landing import Landing
from protos.weights.membership import join
from protos.weights.staging import check_names, digest
from rollout_server.weights.driver import CommitError, CommitTimes, UpdateDriver
from tests.rollout_server.weights.test_driver import OneVersion

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]  # one bucket each
SIZE, COLLECTIVE_S, DEADLINE_S = 16, 3.0, 15.0


def content(version: int, index: int) -> np.ndarray:
    return np.full(SIZE, 16 * version + index, dtype=np.uint8)


def manifest(version: int, names: list[str] = NAMES) -> manifest_pb2.Manifest:
    made = manifest_pb2.Manifest(version=version)
    for index, name in enumerate(names):
        made.tensors.add(name=name, shape=[4], dtype="float32")
        made.buckets.add(num_bytes=SIZE)
        made.slices.add(tensor=index, num_bytes=SIZE, bucket=index, digest=digest(content(version, index)))
    return made


class LandingEngine:
    """The landing of a real engine over weights that are bytes. `fault`: what its commit does."""

    def __init__(self) -> None:
        self.landing = Landing()
        self.loaded_version = 1
        self.weights = {name: content(1, index) for index, name in enumerate(NAMES)}
        self.fault: Callable[[str], None] = lambda at: None

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        check_names(manifest_pb2.Manifest.FromString(manifest), [(name, (4,)) for name in NAMES])
        self.landing.begin_receive(group, manifest, timeout_s)
        while (state := self.landing.state()).phase == "receiving":
            await asyncio.sleep(0.01)
        if state.phase != "ready":
            raise RuntimeError(state.detail)

    async def commit(self, version: int) -> CommitTimes:
        self.fault("take")
        taken = self.landing.take(version)
        for name, tensor in taken.tensors():
            try:
                self.fault(name)
            except MemoryError as error:
                raise CommitError(f"version {version} failed in apply at {name}: MemoryError") from error
            self.weights[name] = tensor.view(torch.uint8).numpy().copy()
        self.loaded_version = version
        return CommitTimes(pause_s=0.0)

    async def discard(self) -> None:
        self.landing.discard()


def raising(error: Exception, *, at: str) -> Callable[[str], None]:
    def fault(where: str) -> None:
        if where == at:
            raise error

    return fault


class Sender:
    """The trainer's end in a thread: sends every bucket, or does what a fault says before bucket `at`."""

    def __init__(self, spec: pb.GroupSpec, version: int, fault: str = "", at: int = 0) -> None:
        self._thread = threading.Thread(target=self._run, args=(spec, version, fault, at), daemon=True)
        self.over = threading.Event()
        self._thread.start()

    def _run(self, spec: pb.GroupSpec, version: int, fault: str, at: int) -> None:
        try:
            if fault == "absent":
                return None
            group = join(spec, [0], root=0, timeout_s=COLLECTIVE_S)
            for index in range(len(NAMES)):
                data = torch.from_numpy(content(version, index))
                if index == at and fault == "dead":
                    return group.close()
                if index == at and fault == "stalled":
                    self.over.wait(10)
                    return group.close()
                if index == at and fault == "flipped":
                    data[5] ^= 1
                if index == at and fault == "half":
                    data = data[: SIZE // 2].clone()
                if index == at and fault == "dropped":
                    data = torch.zeros_like(data)  # the bucket comes, nothing was written into it
                group.broadcast(data, what=f"bucket {index}", timeout_s=COLLECTIVE_S)
            self.over.wait(10)
            group.close()
        except TransferError:
            pass  # what the receiver makes of it is the test

    def stop(self) -> None:
        self.over.set()
        self._thread.join(15)


async def attempt(driver: UpdateDriver, store: dist.TCPStore, version: int, sent: manifest_pb2.Manifest, fault: str = "", at: int = 0) -> pb.UpdateReport:
    """One pushed update; its last report."""
    spec = pb.GroupSpec(
        transport=pb.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=store.port, group_key=f"v{version}", num_owners=1, num_receivers=1, receiver_rank=1,
        receivers=["replica-a"], collective_timeout_s=COLLECTIVE_S,
    )  # fmt: skip
    driver.order(pb.AttendResponse(prepare_update=pb.PrepareUpdate(epoch=version, version=version)))
    assert (await driver.next_report()).phase == pb.UPDATE_PHASE_READY
    sender = Sender(spec, version, fault, at)
    try:
        driver.order(pb.AttendResponse(begin_transfer=pb.BeginTransfer(epoch=version, group=spec, manifest=sent)))
        while True:
            report = await asyncio.wait_for(driver.next_report(), DEADLINE_S)
            if report.phase in (pb.UPDATE_PHASE_LOADED, pb.UPDATE_PHASE_FAILED):
                return report
    finally:
        await asyncio.to_thread(sender.stop)


def full(*_: object) -> list[torch.Tensor]:
    raise TransferError("staging of 48 bytes does not fit on cuda:0, which has 10 of 80 bytes free; lower gpu_memory_fraction by at least 0.48; the old weights stay")


FIRST, MIDDLE, LAST = 0, 1, 2
CASES = [
    # fault, before which bucket, what the report must name
    ("absent", FIRST, "trainer rank 0 did not appear in time"),
    *(("dead", at, "its peers are trainer rank 0") for at in (FIRST, MIDDLE, LAST)),
    *(("stalled", at, "its peers are trainer rank 0") for at in (FIRST, LAST)),
    *(("flipped", at, NAMES[at]) for at in (FIRST, MIDDLE, LAST)),
    *(("dropped", at, NAMES[at]) for at in (FIRST, LAST)),
    *(("half", at, NAMES[at]) for at in (FIRST, LAST)),  # gloo takes a shorter message; its digest does not
]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


async def with_driver(engine: LandingEngine, work: Callable[[UpdateDriver], object]) -> None:
    driver = UpdateDriver(engine, source=OneVersion(0), catch_up_s=60.0, receive_timeout_s=DEADLINE_S)  # type: ignore[arg-type]
    running = asyncio.create_task(driver.run())
    try:
        driver.welcome(1)
        await work(driver)  # type: ignore[misc]
    finally:
        running.cancel()


@pytest.mark.parametrize(("fault", "at", "blamed"), CASES)
async def test_a_fault_on_the_way_leaves_the_old_version_names_its_cause_and_the_next_update_goes_through(store: dist.TCPStore, fault: str, at: int, blamed: str) -> None:
    engine = LandingEngine()

    async def work(driver: UpdateDriver) -> None:
        began = time.monotonic()
        report = await attempt(driver, store, 2, manifest(2), fault, at)
        assert report.phase == pb.UPDATE_PHASE_FAILED and blamed in report.detail, report.detail
        assert time.monotonic() - began < DEADLINE_S
        assert not driver.stale and engine.loaded_version == 1 and all((engine.weights[name] == content(1, i)).all() for i, name in enumerate(NAMES))
        assert (await attempt(driver, store, 3, manifest(3))).phase == pb.UPDATE_PHASE_LOADED
        assert engine.loaded_version == 3 and all((engine.weights[name] == content(3, i)).all() for i, name in enumerate(NAMES))

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
        assert "lower gpu_memory_fraction by at least 0.48" in report.detail and not driver.stale and engine.loaded_version == 1
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

