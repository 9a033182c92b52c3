"""The real engine's lives and deaths, and kept KV: an engine start each, hence slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from protos.rollout.v1alpha1 import rollout_pb2 as pb
from rollout_server.config import RolloutConfig
from rollout_server.engine import EngineUnavailableError
from rollout_server.replica import Replica
from rollout_server.vllm_engine import VllmEngine
from tests.rollout_server import reference
from tests.rollout_server.reference import Sample, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = [10 + i % 200 for i in range(70)]


@contextlib.asynccontextmanager
async def an_engine(folder: Path, **values: object) -> AsyncIterator[VllmEngine]:
    small: dict[str, object] = {"max_model_len": 512, "max_num_seqs": 32, "kv_cache_bytes": 64 << 20, "threads": 1}
    engine = VllmEngine(RolloutConfig(model=str(folder), **(small | values)), folder)  # type: ignore[arg-type]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def test_kept_kv_continues_under_new_weights_aborts_nobody_and_is_never_found_by_later_requests(
    tiny_model: Path, tmp_path: Path
) -> None:
    # faults.md 31: 16 streams, none aborted, each with both versions
    other = reference.perturbed(tiny_model, tmp_path / "other", seed=1)
    old, new = reference.load(tiny_model), reference.load(other)
    async with an_engine(tiny_model, in_flight="keep") as engine:
        await reference.stage(engine, other, 1)
        samples = [Sample(engine, PROMPT, f"long{i}", temperature=1.0, max_new_tokens=300, seed=i) for i in range(16)]
        await asyncio.gather(*[sample.drawn(40) for sample in samples])
        await engine.commit(1)
        later = await Sample(engine, PROMPT, "later", temperature=1.0, max_new_tokens=24, seed=99).task
        assert any(not sample.task.done() for sample in samples)  # old KV of the same prompt was still held
        await asyncio.gather(*[sample.task for sample in samples])
        for sample in samples:
            assert sample.last is not None and sample.last.finish == "length"
            assert [span.version for span in sample.last.spans] == [0, 1]
            k = sample.last.spans[1].start
            assert largest_difference(sample.logprobs[:k], reference.logprobs(old, PROMPT, sample.ids)[:k]) < 1e-4
            on_kept = reference.logprobs_on_kept_kv(old, new, PROMPT, sample.ids, k)
            assert largest_difference(sample.logprobs[k:], on_kept) < 1e-4
            assert largest_difference(sample.logprobs[k:], reference.logprobs(new, PROMPT, sample.ids)[k:]) > 1e-3
        assert largest_difference(later.logprobs, reference.logprobs(new, PROMPT, later.ids)) < 1e-4


async def test_a_killed_engine_process_ends_its_requests_and_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    # faults.md 11, 12: an engine that lost what it held serves nothing (STARTING) until the version is back, and then that one, not the folder's weights
    other = reference.perturbed(tiny_model, tmp_path / "other", seed=1)
    async with an_engine(tiny_model) as engine, contextlib.AsyncExitStack() as exit_stack:
        replica = Replica(engine, attends=False, max_num_seqs=32)
        replica._up, replica.life = True, 1
        await replica.load_folder(other)
        watching = asyncio.create_task(replica.supervise())
        exit_stack.callback(watching.cancel)
        sample = Sample(engine, PROMPT, "cut", temperature=1.0, max_new_tokens=400, seed=1)
        await sample.drawn(5)
        living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        (core,) = [child for child in living if "EngineCor" in child.name()]
        core.kill()
        with pytest.raises(EngineUnavailableError):
            await asyncio.wait_for(sample.task, 60)
        async with asyncio.timeout(120):
            while replica.state != pb.REPLICA_STATE_STARTING:
                await asyncio.sleep(0.05)
        async with asyncio.timeout(300):
            while replica.state != pb.REPLICA_STATE_SERVING or not engine.loaded_version:
                await asyncio.sleep(0.1)
        again = await Sample(engine, PROMPT, "again", temperature=1.0, max_new_tokens=24, seed=1).task
        assert largest_difference(again.logprobs, reference.logprobs(reference.load(other), PROMPT, again.ids)) < 1e-4


def runs(process: psutil.Process) -> bool:
    """Whether a process still holds memory: neither gone nor waiting for its new parent to read its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_of_a_killed_server_stays_behind(tiny_model: Path, tmp_path: Path) -> None:  # faults.md 128
    config, log = tmp_path / "rollout.json", tmp_path / "log"
    config.write_text(json.dumps({"model": str(tiny_model), "max_model_len": 256, "kv_cache_bytes": 64 << 20, "threads": 1}))
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "rollout_server", "--config", str(config)], stderr=out)
    try:
        end_s = time.monotonic() + 300
        while "serves" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.2)
        children = [child for child in psutil.Process(process.pid).children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
        assert children
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        end_s = time.monotonic() + 60
        while any(map(runs, children)):
            assert time.monotonic() < end_s, [child for child in children if runs(child)]
            time.sleep(0.1)
    finally:
        process.kill()


def test_a_model_that_cannot_be_served_as_configured_is_the_users_mistake(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "rollout.json"
    config.write_text(json.dumps({"model": str(tiny_model), "max_model_len": 100_000, "kv_cache_bytes": 64 << 20}))
    done = subprocess.run([sys.executable, "-m", "rollout_server", "--config", str(config)], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
    assert done.returncode == 2 and "max_model_len" in lines[0] and "Traceback" not in done.stderr
