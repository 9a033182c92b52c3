"""One vLLM engine of ours and one trainer process beside it, for the scripts that measure weight updates on a GPU."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._line import ROOT
from benchmarks._update_trainer import spec_of
from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine
from rollout_server.weights.driver import CommitTimes


class TrainerProcess:
    """Lines to benchmarks/_update_trainer.py, answers back."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, model: Path, root: Path, *, device: str, transport: str, bucket_mib: int = 256) -> TrainerProcess:
        command = [sys.executable, "-m", "benchmarks._update_trainer", str(model), str(root), device, transport, str(bucket_mib)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, limit=1 << 26)
        made = cls(process)
        await made._answer()
        return made

    async def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 300)
        if not line:
            raise RuntimeError(f"the trainer process ended with {await self.process.wait()}; its error is on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One version as it went. Seconds."""

    version: int
    num_bytes: int
    write_s: float  # snapshot
    transfer_s: float  # begin to verified, beside generation
    times: CommitTimes
    spans: tuple[tuple[str, float, float], ...] = ()  # pieces by name, began, ended: of the trainer, of the engine's process, and of the commit; monotonic clock


@dataclass(kw_only=True, slots=True)
class Scene:
    engine: VllmEngine
    trainer: TrainerProcess
    transport: str

    async def update(self, seed: int | None) -> Update:
        """A version in full. seed: weights are moved by it first; None: as they were moved before."""
        loop = asyncio.get_running_loop()
        written = await self.trainer.ask("write" if seed is None else f"write {seed}")
        spec = spec_of(self.transport, written["store_port"], receiver_rank=1)
        began = loop.time()
        sending = asyncio.create_task(self.trainer.ask("send"))
        receiving = self.engine.receive(spec.SerializeToString(), bytes.fromhex(written["manifest"]), 60.0)
        received, sent = await asyncio.gather(receiving, sending, return_exceptions=True)
        took_s = loop.time() - began
        if isinstance(sent, BaseException) or sent["error"] or isinstance(received, BaseException):
            raise RuntimeError(f"the trainer says {sent}, the replica {received!r}")
        committing = time.monotonic()
        times = await self.engine.commit(written["version"])
        spans = [("commit", committing, time.monotonic()), *named("trainer", [*written["spans"], *sent["spans"]]), *pieces(times, time.monotonic())]
        for marked in await self.engine._rpc("headrace_marks", timeout_s=60.0):
            spans += named("engine", marked)
        return Update(version=written["version"], num_bytes=written["num_bytes"], write_s=written["write_s"], transfer_s=took_s, times=times, spans=tuple(spans))


def named(whose: str, spans: Iterable[Sequence[Any]]) -> list[tuple[str, float, float]]:
    return [(f"{whose}: {name}", began, ended) for name, began, ended in spans]


def pieces(times: CommitTimes, ended: float) -> list[tuple[str, float, float]]:
    """Those of a pause, which follow one another up to its end."""
    found = []
    for name, took_s in reversed(times.pieces_s.items()):
        found.append((f"pause: {name}", ended - took_s, ended))
        ended -= took_s
    return found[::-1]


@asynccontextmanager
async def scene(model: Path, root: Path, *, transport: str, device: str, bucket_mib: int = 256, **settings: Any) -> AsyncIterator[Scene]:
    """Engine and trainer, which start side by side. settings: of RolloutConfig."""
    engine = VllmEngine(RolloutConfig(model=str(model), **settings), model)
    starting = asyncio.create_task(TrainerProcess.start(model, root, device=device, transport=transport, bucket_mib=bucket_mib))
    try:
        await engine.start()
        yield Scene(engine=engine, trainer=await starting, transport=transport)
    finally:
        with suppress(Exception):  # what it raised has been raised above
            await (await starting).stop()
        await engine.stop()
