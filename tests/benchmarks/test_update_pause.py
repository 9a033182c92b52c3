"""The windows of update_pause over an engine that is made up: what is said of each update, and the file that a cut run leaves."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import _line, update_pause
from benchmarks._update_scene import Update, pieces
from rollout_server.weights.driver import CommitTimes

STEP_S, HELD_UP_S = 0.002, 0.06


class Engine:
    """Draws a token for each stream every 2 ms, unless an update holds it up."""

    def __init__(self) -> None:
        self.apply_reason = ""
        self._accounting = SimpleNamespace(num_arrived=0)
        self.queue = SimpleNamespace(put_nowait=lambda outputs: None)
        self._engine = SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=self.queue))
        self.free = asyncio.Event()
        self.free.set()

    async def step(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            await self.free.wait()
            self._accounting.num_arrived += 4
            self.queue.put_nowait(SimpleNamespace(outputs=[1], timestamp=time.monotonic()))

    async def generate(self, prompt: list[int], sampling: Any, name: str, *, stream: bool = True) -> AsyncIterator[Any]:
        if name == "check":
            yield SimpleNamespace(token_ids=[1] * 64, logprobs=[-1.0] * 64, finish="length")
            return
        while True:
            await asyncio.sleep(STEP_S)
            await self.free.wait()
            yield SimpleNamespace(finish="")


class Made:
    """A scene whose every update holds the engine up for 60 ms in its digest."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.asked: list[str] = []
        self.trainer = SimpleNamespace(ask=self.ask)

    async def ask(self, line: str) -> dict[str, Any]:
        self.asked.append(line.partition(" ")[0])
        answers: dict[str, dict[str, Any]] = {"copy": {"copy_s": 0.001}, "logprobs": {"logprobs": [-1.0] * 95}, "move": {"moved": True}}
        return answers[self.asked[-1]]

    async def update(self, seed: int | None) -> Update:
        assert seed is None and self.asked[-1] != "update"  # moved before the window
        began = time.monotonic()
        self.engine.free.clear()
        await asyncio.sleep(HELD_UP_S)
        self.engine.free.set()
        ended = time.monotonic()
        await asyncio.sleep(5 * STEP_S)
        times = CommitTimes(pause_s=0.001, pieces_s={"pause": 0.0005, "apply": 0.0005})
        return Update(version=1, num_bytes=8, write_s=0.0, transfer_s=ended - began, times=times, spans=(("engine: digest", began, ended), *pieces(times, time.monotonic())))


async def test_an_update_is_told_piece_by_piece_and_the_file_holds_every_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_pause, "_SETTLE_S", 0.0)
    callbacks = list(gc.callbacks)
    partial = tmp_path / "partial.json"
    options = update_pause.arguments(argparse.ArgumentParser()).parse_args(["--requests", "4", "--streams", "4", "--seconds", "0.15", "--partial", str(partial)])
    made = Made()
    stepping = asyncio.create_task(made.engine.step())
    bars, pairs, notes = await update_pause.windows(made, options)  # type: ignore[arg-type]
    stepping.cancel()
    assert len(pairs) == _line.MIN_PAIRS and {bar.name for bar in bars} == {"gap_excess_ms", "aborted", "logprob_difference", "tokens_lost_share"}
    assert list(notes["charged_ms"]) == ["engine: digest", "pause: pause", "pause: apply"]
    updates = notes["updates"]
    assert len(updates) == 2 + _line.MIN_PAIRS and all(update["charges"]["engine: digest"]["took_ms"] >= 1e3 * HELD_UP_S for update in updates)
    # On a machine that is busy otherwise any step may be long: of all updates at least one shows what held it up.
    assert max(update["charges"]["engine: digest"]["charged_ms"] for update in updates) > 0
    assert any("engine: digest" in gap["pieces_ms"] for update in updates for gap in update["longest"])
    kept = json.loads(partial.read_text())
    assert kept["partial"] is True and len(kept["pairs"]) == _line.MIN_PAIRS
    assert made.asked.count("move") == 2 + _line.MIN_PAIRS and gc.callbacks == callbacks


async def test_no_pair_begins_after_the_limit_and_what_was_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_pause, "_SETTLE_S", 0.0)
    options = update_pause.arguments(argparse.ArgumentParser()).parse_args(["--requests", "4", "--streams", "4", "--seconds", "0.15", "--limit-s", "0"])
    made = Made()
    stepping = asyncio.create_task(made.engine.step())
    _, pairs, notes = await update_pause.windows(made, options)  # type: ignore[arg-type]
    stepping.cancel()
    assert len(pairs) == 1 and len(notes["updates"]) == 3


def test_the_pieces_of_a_pause_follow_one_another_up_to_its_end() -> None:
    found = pieces(CommitTimes(pause_s=0.75, pieces_s={"pause": 0.5, "apply": 0.25}), 10.0)
    assert found == [("pause: pause", 9.25, 9.75), ("pause: apply", 9.75, 10.0)]
