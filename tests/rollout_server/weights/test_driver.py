"""The driver against an engine that records its calls."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from protos.weights.mirror import Mirror
from rollout_server.weights.driver import CommitError, CommitTimes, UpdateDriver
from rollout_server.weights.transaction import Phase


class RecordingEngine:
    """Does what the test's script says and records the order of calls."""

    def __init__(self, loaded_version: int = 0) -> None:
        self.loaded_version = loaded_version
        self.calls: list[str] = []
        self.receive_error: Exception | None = None
        self.commit_error: Exception | None = None
        self.hold_receive = asyncio.Event()
        self.hold_receive.set()
        self.staged = b""
        self.stage_error: Exception | None = None
        self.probed: list[float] = []

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        self.calls.append("receive")
        try:
            await self.hold_receive.wait()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise
        if self.receive_error:
            raise self.receive_error

    async def stage_folder(self, folder: Path, manifest: bytes, timeout_s: float) -> None:
        self.calls.append("stage")
        self.staged = (folder / "rank-0.bin").read_bytes()
        if self.stage_error:
            raise self.stage_error

    async def commit(self, version: int) -> CommitTimes:
        self.calls += ["pause", "apply"]
        if self.commit_error:
            raise self.commit_error
        self.calls += ["flush", "version", "resume"]
        self.loaded_version = version
        return CommitTimes(pause_s=0.25)

    async def probe(self, token_ids: list[int]) -> list[float]:
        self.calls.append("probe")
        return self.probed

    async def discard(self) -> None:
        self.calls.append("discard")


class OneVersion:
    """A source whose newest version is `version`, two bytes of it. `asked`: what was wanted, and what lay here then."""

    def __init__(self, version: int, error: Exception | None = None) -> None:
        self.version = version
        self.error = error
        self.asked: list[tuple[int, int]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.mirror = Mirror(Path(self.folder.name) / "mirror")

    async def bring(self, newest: int) -> None:
        self.asked.append((newest, self.mirror.version))
        if self.error:
            raise self.error
        if self.mirror.version == newest:
            return  # it lies there already
        self.mirror.open(manifest_pb2.Manifest(version=self.version, buckets=[manifest_pb2.Bucket(num_bytes=2)]))
        self.mirror.write(0, 0, b"ab")
        self.mirror.close()


def prepare(epoch: int, version: int) -> pb.AttendResponse:
    return pb.AttendResponse(prepare_update=pb.PrepareUpdate(epoch=epoch, version=version))


def begin(epoch: int, version: int) -> pb.AttendResponse:
    return pb.AttendResponse(begin_transfer=pb.BeginTransfer(epoch=epoch, manifest=manifest_pb2.Manifest(version=version)))


class Running:
    """A driver with its task."""

    def __init__(self, engine: RecordingEngine, **options: object) -> None:
        self.driver = UpdateDriver(engine, **{"source": OneVersion(0), "catch_up_s": 30.0, **options})  # type: ignore[arg-type]

    async def __aenter__(self) -> UpdateDriver:
        self.task = asyncio.create_task(self.driver.run())
        return self.driver

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def report(driver: UpdateDriver) -> tuple[str, int, int]:
    """(phase, epoch, version) of the next report."""
    got = await asyncio.wait_for(driver.next_report(), 30)
    return pb.UpdatePhase.Name(got.phase).removeprefix("UPDATE_PHASE_"), got.epoch, got.version


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_pushed_version_is_received_then_applied_in_the_recorded_order() -> None:
    engine = RecordingEngine(loaded_version=8)
    async with Running(engine) as driver:
        driver.welcome(8)
        driver.order(prepare(4, 9))
        assert await report(driver) == ("READY", 4, 9)
        driver.order(begin(4, 9))
        assert await report(driver) == ("RECEIVED", 4, 9)
        last = await asyncio.wait_for(driver.next_report(), 30)
    assert (last.phase, last.pause_s, last.state) == (pb.UPDATE_PHASE_LOADED, 0.25, rollout_pb2.REPLICA_STATE_SERVING)
    assert engine.calls == ["receive", "pause", "apply", "flush", "version", "resume"]  # faults.md 30
    assert driver.state.loaded == 9


async def test_a_failed_receive_leaves_the_old_version_serving_and_names_the_tensor() -> None:
    engine = RecordingEngine(loaded_version=8)
    engine.receive_error = RuntimeError("model.norm.weight differs")
    async with Running(engine) as driver:
        driver.welcome(8)
        driver.order(prepare(4, 9))
        driver.order(begin(4, 9))
        await report(driver)
        got = await asyncio.wait_for(driver.next_report(), 30)
        await until(lambda: "discard" in engine.calls)
    assert got.phase == pb.UPDATE_PHASE_FAILED and "model.norm.weight differs" in got.detail
    assert got.state == rollout_pb2.REPLICA_STATE_SERVING
    assert engine.calls == ["receive", "discard"] and engine.loaded_version == 8


async def test_a_commit_that_broke_makes_the_replica_stale_until_a_fetch_succeeds() -> None:
    engine = RecordingEngine(loaded_version=8)
    engine.commit_error = CommitError("half applied")
    source = OneVersion(9)
    async with Running(engine, source=source, catch_up_s=0.2) as driver:
        driver.welcome(9)
        driver.order(prepare(4, 9))
        driver.order(begin(4, 9))
        assert [(await report(driver))[0] for _ in range(2)] == ["READY", "RECEIVED"]
        got = await asyncio.wait_for(driver.next_report(), 30)
        assert got.phase == pb.UPDATE_PHASE_FAILED and got.state == rollout_pb2.REPLICA_STATE_STALE and driver.stale
        engine.commit_error = None
        assert await report(driver) == ("LOADED", 0, 9)
        assert not driver.stale
    assert source.asked == [(9, 0)]  # what it has is not to be built on
    assert engine.staged == b"ab" and source.mirror.version == 9


@pytest.mark.parametrize(("probed", "phase"), [([-1.0, -2.1], "LOADED"), ([-1.0, -2.5], "FAILED")])
async def test_a_probe_prompt_is_held_against_the_trainer_s_log_probs_after_the_commit(probed: list[float], phase: str) -> None:
    engine = RecordingEngine(loaded_version=8)
    engine.probed = probed
    order = begin(4, 9)
    # Mean differences 0.05 and 0.25.
    order.begin_transfer.manifest.verify = manifest_pb2.VERIFY_LOGPROBS
    order.begin_transfer.manifest.probe.CopyFrom(manifest_pb2.Probe(token_ids=[3, 4, 5], logprobs=[-1.0, -2.0], tolerance=0.1))
    async with Running(engine) as driver:
        driver.welcome(8)
        driver.order(prepare(4, 9))
        driver.order(order)
        reports = [await asyncio.wait_for(driver.next_report(), 30) for _ in range(3)]
        assert pb.UpdatePhase.Name(reports[-1].phase) == f"UPDATE_PHASE_{phase}"
        assert driver.stale == (phase == "FAILED")
        assert phase == "LOADED" or "differ from the trainer's by 0.25 in the mean, more than 0.1" in reports[-1].detail
    assert engine.calls[:7] == ["receive", "pause", "apply", "flush", "version", "resume", "probe"]


async def test_a_commit_refused_before_weights_were_touched_leaves_the_old_version_serving() -> None:
    engine = RecordingEngine(loaded_version=8)
    engine.commit_error = ValueError("paused by somebody else")
    async with Running(engine) as driver:
        driver.welcome(8)
        driver.order(prepare(4, 9))
        driver.order(begin(4, 9))
        assert [(await report(driver))[0] for _ in range(3)] == ["READY", "RECEIVED", "FAILED"]
        assert not driver.stale and driver.state.loaded == 8


async def test_an_aborted_epoch_cancels_the_receive_and_the_next_one_goes_through() -> None:
    engine = RecordingEngine(loaded_version=8)
    engine.hold_receive.clear()
    async with Running(engine) as driver:
        driver.welcome(8)
        driver.order(prepare(4, 9))
        driver.order(begin(4, 9))
        await until(lambda: engine.calls == ["receive"])
        driver.order(pb.AttendResponse(abort_update=pb.AbortUpdate(epoch=4, reason="a member died")))
        await until(lambda: engine.calls == ["receive", "cancelled", "discard"])
        engine.hold_receive.set()
        driver.order(prepare(5, 9))
        driver.order(begin(5, 9))
        assert [await report(driver) for _ in range(4)] == [("READY", 4, 9), ("READY", 5, 9), ("RECEIVED", 5, 9), ("LOADED", 5, 9)]


async def test_a_new_replica_fetches_at_once_and_one_that_serves_waits_for_the_push() -> None:
    new, serving = RecordingEngine(), RecordingEngine(loaded_version=8)
    async with Running(new, source=OneVersion(9)) as first, Running(serving, source=OneVersion(9)) as second:
        first.welcome(9)
        second.welcome(9)
        assert await report(first) == ("LOADED", 0, 9)
        await asyncio.sleep(0.3)  # catch_up_s is 30
        assert serving.calls == [] and second.state.phase is Phase.IDLE


async def test_behind_for_catch_up_s_it_fetches_with_the_version_it_has() -> None:
    engine = RecordingEngine(loaded_version=8)
    source = OneVersion(9)
    async with Running(engine, source=source, catch_up_s=0.2) as driver:
        driver.welcome(8)
        driver.order(pb.AttendResponse(published=pb.Published(version=9)))
        assert await report(driver) == ("LOADED", 0, 9)
        source.version = 10
        driver.order(pb.AttendResponse(published=pb.Published(version=10)))
        assert await report(driver) == ("LOADED", 0, 10)
    assert source.asked == [(9, 0), (10, 9)]


async def test_what_the_engine_refuses_is_not_built_upon() -> None:
    engine, source = RecordingEngine(), OneVersion(9)
    engine.stage_error = RuntimeError("model.norm.weight differs")
    async with Running(engine, source=source, catch_up_s=0.2) as driver:
        driver.welcome(9)
        got = await asyncio.wait_for(driver.next_report(), 30)
        assert got.phase == pb.UPDATE_PHASE_FAILED and "model.norm.weight differs" in got.detail
        engine.stage_error = None
        assert await report(driver) == ("LOADED", 0, 9)
    assert source.asked == [(9, 0), (9, 0)]


async def test_what_lay_here_already_is_brought_anew_once_the_engine_has_refused_it() -> None:
    engine, source, reports = RecordingEngine(), OneVersion(9), []
    engine.commit_error = ValueError("paused by somebody else")
    async with Running(engine, source=source, catch_up_s=0.2) as driver:
        driver.welcome(9)
        reports.append(await report(driver))  # whole and verified, but not applied
        engine.commit_error, engine.stage_error = None, RuntimeError("a bit of the copy has flipped")
        reports.append(await report(driver))
        engine.stage_error = None
        reports.append(await report(driver))
    assert reports == [("FAILED", 0, 9), ("FAILED", 0, 9), ("LOADED", 0, 9)]
    assert source.asked == [(9, 0), (9, 9), (9, 0)]


async def test_a_held_version_is_committed_when_told_and_a_push_gives_the_mirror_s_memory_back() -> None:
    engine, source = RecordingEngine(), OneVersion(8)
    async with Running(engine, source=source) as driver:
        driver.welcome(8)
        assert await report(driver) == ("LOADED", 0, 8) and source.mirror.folder.exists()
        driver.order(prepare(4, 9))
        order = begin(4, 9)
        order.begin_transfer.hold = True
        driver.order(order)
        assert [await report(driver) for _ in range(2)] == [("READY", 4, 9), ("RECEIVED", 4, 9)]
        await asyncio.sleep(0.1)
        assert driver.state.phase is Phase.HELD and engine.loaded_version == 8
        driver.order(pb.AttendResponse(commit_update=pb.CommitUpdate(epoch=4)))
        assert await report(driver) == ("LOADED", 4, 9)
    assert source.mirror.version == 0 and not source.mirror.folder.exists()


async def test_nothing_is_fetched_while_the_learner_is_away() -> None:
    engine = RecordingEngine()
    async with Running(engine, source=OneVersion(9), catch_up_s=0.1) as driver:
        driver.welcome(0)
        driver.detached()
        driver.order(pb.AttendResponse(published=pb.Published(version=9)))
        await asyncio.sleep(0.3)
        assert engine.calls == []


async def test_failed_fetches_are_tried_again_ever_more_slowly() -> None:
    engine, source = RecordingEngine(), OneVersion(9, RuntimeError("gateway is away"))
    async with Running(engine, source=source, catch_up_s=0.2) as driver:
        driver.welcome(9)
        await asyncio.sleep(1.1)  # at 0, +0.2, +0.4, +0.8 s: three within the second, a fourth after 1.4
    assert len(source.asked) == 3


async def test_a_receive_that_ignores_its_deadline_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.weights.driver._MARGIN_S", 0.1)
    engine = RecordingEngine(loaded_version=8)
    engine.hold_receive.clear()
    async with Running(engine, receive_timeout_s=0.1) as driver:
        driver.welcome(8)
        driver.order(prepare(4, 9))
        driver.order(begin(4, 9))
        assert [await report(driver) for _ in range(2)] == [("READY", 4, 9), ("FAILED", 4, 9)]
    assert engine.calls == ["receive", "cancelled", "discard"]


async def test_a_replica_is_as_patient_as_the_learner_and_never_less_than_its_own_limit() -> None:
    given: list[float] = []

    class Noting(RecordingEngine):
        async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
            given.append(timeout_s)
            await super().receive(group, manifest, timeout_s)

    async with Running(Noting(loaded_version=8)) as driver:
        for version, push_deadline_s in ((9, 15.0), (10, 3600.0), (11, 15.0)):
            driver.welcome(version, push_deadline_s)
            driver.order(prepare(version, version))
            driver.order(begin(version, version))
            for _ in range(3):
                await report(driver)
    assert given == [300.0, 3600.0, 300.0]
