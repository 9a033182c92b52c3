"""An engine that is a real landing over weights of bytes, and a trainer's end that does what a fault says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.landing import Landing
from protos.weights.membership import join
from protos.weights.staging import check_names, digest, no_room
from rollout_server.weights.driver import CommitError, CommitTimes, UpdateDriver
from rollout_server.weights.fetching import Source
from tests.rollout_server.weights.test_driver import OneVersion

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]  # one bucket each
SIZE, COLLECTIVE_S, DEADLINE_S = 16, 3.0, 40.0
SILENT_S = 4 * DEADLINE_S  # a stalled peer is not heard again within any deadline


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
        await self._landed()

    async def stage_folder(self, folder: Path, manifest: bytes, timeout_s: float) -> None:
        check_names(manifest_pb2.Manifest.FromString(manifest), [(name, (4,)) for name in NAMES])
        self.landing.begin_folder(str(folder), manifest)
        await self._landed()

    async def _landed(self) -> None:
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
                    self.over.wait(SILENT_S)
                    return group.close()
                if index == at and fault == "flipped":
                    data[5] ^= 1
                if index == at and fault == "half":
                    data = data[: SIZE // 2].clone()
                if index == at and fault == "dropped":
                    data = torch.zeros_like(data)  # the bucket comes, nothing was written into it
                group.broadcast(data, what=f"bucket {index}", timeout_s=COLLECTIVE_S)
            self.over.wait(SILENT_S)
            group.close()
        except TransferError:
            pass  # what the receiver makes of it is the test

    def stop(self) -> None:
        self.over.set()
        self._thread.join(15)


async def attempt(driver: UpdateDriver, store: dist.TCPStore, version: int, sent: manifest_pb2.Manifest, fault: str = "", at: int = 0, *, hold: bool = False) -> pb.UpdateReport:
    """One pushed update; its last report (with hold: that it was received)."""
    spec = pb.GroupSpec(
        transport=pb.TRANSPORT_GLOO, store_host="127.0.0.1", store_port=store.port, group_key=f"v{version}", num_owners=1, num_receivers=1, receiver_rank=1,
        receivers=["replica-a"], collective_timeout_s=COLLECTIVE_S,
    )  # fmt: skip
    driver.order(pb.AttendResponse(prepare_update=pb.PrepareUpdate(epoch=version, version=version)))
    assert (await driver.next_report()).phase == pb.UPDATE_PHASE_READY
    sender = Sender(spec, version, fault, at)
    try:
        driver.order(pb.AttendResponse(begin_transfer=pb.BeginTransfer(epoch=version, group=spec, manifest=sent, hold=hold)))
        while True:
            report = await asyncio.wait_for(driver.next_report(), DEADLINE_S)
            if report.phase in (pb.UPDATE_PHASE_LOADED, pb.UPDATE_PHASE_FAILED) or hold:
                return report
    finally:
        await asyncio.to_thread(sender.stop)


FULL = f"staging of 48 bytes (the largest of 3 tensors is {NAMES[0]}, 16 bytes) does not fit on cuda:0, which has 8 of 80 bytes free; lower gpu_memory_fraction by at least 0.50"


def full(sizes: list[int], device: torch.device, manifest: manifest_pb2.Manifest) -> list[torch.Tensor]:
    """(48 - 8) / 80 = 0.5 of the device lack."""
    raise TransferError(no_room(sizes, manifest, torch.device("cuda", 0), 8, 80))


async def with_driver(engine: LandingEngine, work: Callable[[UpdateDriver], object], *, source: Source | None = None, newest: int = 1, **options: float) -> None:
    """Runs `work` beside a driver that attends and has heard of version `newest`."""
    driver = UpdateDriver(engine, source=source or OneVersion(0), **{"catch_up_s": 60.0, "receive_timeout_s": 2 * DEADLINE_S, **options})  # type: ignore[arg-type]
    running = asyncio.create_task(driver.run())
    try:
        driver.welcome(newest)
        await work(driver)  # type: ignore[misc]
    finally:
        running.cancel()


def unchanged(engine: LandingEngine, version: int = 1) -> bool:
    """Whether every weight is of this version."""
    return engine.loaded_version == version and all((engine.weights[name] == content(version, i)).all() for i, name in enumerate(NAMES))
