"""What a weight update costs those who wait for tokens, on a GPU: `python -m benchmarks.update_pause --json`.

A random model of half a gigabyte served by vLLM with 256 requests in flight, 240 of them as an actor draws them (one message at the end) and
16 as streams; a trainer process on the same GPU sends a version every 5 s by CUDA IPC, beside generation. Windows of 5 s with one
update and without any take turns; the trainer's weights are moved (its optimizer's work, which is no part of an update) before a window begins. A gap is the time between two messages of one stream; the excess of a window is its longest gap
less the median gap. Peer: one flat device copy of the same bytes. Tokens are counted as they leave the engine. After the first and the
last update a sample's log-probs are held against the trainer's own forward pass. For each window also where its longest gap comes from
(benchmarks/_stalls.py), and for each update what every piece of it (snapshot, loading, copies, digests, pause) costs the engine's steps
(benchmarks/_phases.py) and what all threads did in its longest silence. Progress goes to stderr, a JSON line a window, and with --partial FILE what was found so far to a file.
`--device cpu --transport gloo --hidden 64 --layers 2` goes through the same motions on a CPU; its bars mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _line, _phases
from benchmarks._line import Bar, Pair
from benchmarks._stalls import Stalls
from benchmarks._update_scene import Scene, Update, scene
from deploy.models import tiny
from rollout_server.engine import SamplingSpec

NUM_REQUESTS, NUM_STREAMS, NEW_TOKENS, PROMPT_TOKENS = 256, 16, 1024, 64
_STARTED = time.monotonic()
_SETTLE_S = 0.2  # after the weights were moved, before a window begins
NOISE = 0.06  # mean absolute difference of bfloat16 log-probs, engine against transformers; other weights differ by more than 0.2


class Load:
    """Requests that go on for ever, each followed by another. `gaps_s` is of the streams in the present window."""

    def __init__(self, made: Scene, num_requests: int, num_streams: int) -> None:
        self._made = made
        self._streams = [number < num_streams for number in range(num_requests)]
        self.gaps_s: list[float] = []
        self.num_aborted = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._requests(number, stream)) for number, stream in enumerate(self._streams)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what ended a request."""
        for task in self._tasks:
            if task.done():
                task.result()

    @property
    def num_tokens(self) -> int:
        """Drawn by the engine since its start."""
        assert self._made.engine._accounting is not None
        return self._made.engine._accounting.num_arrived

    async def _requests(self, number: int, stream: bool) -> None:
        now_s, turn, draw = asyncio.get_running_loop().time, 0, random.Random(number)
        while True:
            prompt = [draw.randrange(3, 200) for _ in range(PROMPT_TOKENS)]
            turn += 1
            # Lengths differ, so that requests do not all end at once.
            sampling = SamplingSpec(temperature=1.0, max_new_tokens=draw.randrange(NEW_TOKENS // 2, NEW_TOKENS), seed=number + 1000 * turn)
            last_s = 0.0
            async with aclosing(self._made.engine.generate(prompt, sampling, f"{number}-{turn}", stream=stream)) as deltas:
                async for delta in deltas:
                    at_s = now_s()
                    if last_s:
                        self.gaps_s.append(at_s - last_s)
                    last_s = at_s
                    self.num_aborted += delta.finish == "abort"


async def window(made: Scene, load: Load, stalls: Stalls, seconds: float, seed: int | None) -> dict[str, Any]:
    """One window; with a seed one update, begun at its start."""
    loop = asyncio.get_running_loop()
    if seed is not None:
        await made.trainer.ask(f"move {seed}")
        await asyncio.sleep(_SETTLE_S)
    stalls.reset()
    stalls.stacks_wanted = 2 if seed is not None else 0
    load.gaps_s, tokens, began = [], load.num_tokens, loop.time()
    update = await made.update(None) if seed is not None else None
    await asyncio.sleep(max(0.0, seconds - (loop.time() - began)))
    load.check()
    took_s = loop.time() - began
    found = {"rate": (load.num_tokens - tokens) / took_s, "excess_s": max(load.gaps_s) - statistics.median(load.gaps_s), "median_s": statistics.median(load.gaps_s), "stalls": stalls.found()}
    pieces: dict[str, Any] = {}
    if update is not None:
        first, last = min(began for _, began, _ in update.spans), max(ended for *_, ended in update.spans)
        pieces = {
            "pause_s": update.times.pause_s, "transfer_s": update.transfer_s, **update.times.pieces_s, "lost_ms": 1e3 * _phases.lost_s(stalls.ends, first, last),
            "charges": _phases.charges(stalls.ends, update.spans), "longest": _phases.longest(stalls.ends, update.spans), "stacks": stalls.stacks,
        }  # fmt: skip
    print(json.dumps({**found, **{name: value for name, value in pieces.items() if name != "stacks"}}), file=sys.stderr, flush=True)
    return {**found, "update": update, "pieces": pieces}


async def difference(made: Scene) -> float:
    """Mean absolute difference of a fresh sample's log-probs from the trainer's."""
    prompt = [random.randrange(3, 200) for _ in range(32)]
    (delta,) = [d async for d in made.engine.generate(prompt, SamplingSpec(temperature=1.0, max_new_tokens=64, seed=1), "check", stream=False)]
    theirs = (await made.trainer.ask("logprobs " + ",".join(map(str, [*prompt, *delta.token_ids]))))["logprobs"][-64:]
    return float(sum(abs(a - b) for a, b in zip(delta.logprobs, theirs, strict=True)) / 64)


@dataclass(kw_only=True, slots=True)
class Found:
    """What the windows gave so far."""

    pairs: list[Pair] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    stalls: list[dict[str, Any]] = field(default_factory=list)  # of each pair: with an update, and without
    pieces: list[dict[str, Any]] = field(default_factory=list)  # of each window with an update, the ones before the pairs too
    differences: list[float] = field(default_factory=list)  # nat
    num_aborted: int = 0

    def add(self, window_with: dict[str, Any], window_without: dict[str, Any]) -> None:
        self.updates.append(window_with["update"])
        self.pieces.append(window_with["pieces"])
        self.stalls.append({"with": window_with["stalls"], "without": window_without["stalls"]})
        self.pairs.append({
            "excess_ms": 1e3 * window_with["excess_s"], "excess_without_ms": 1e3 * window_without["excess_s"], "engine_excess_ms": window_with["stalls"]["engine_excess_ms"],
            "engine_excess_without_ms": window_without["stalls"]["engine_excess_ms"], "tokens_per_s": window_with["rate"], "tokens_per_s_without": window_without["rate"],
            "median_gap_ms": 1e3 * window_without["median_s"],
        })  # fmt: skip

    def median(self, name: str) -> float:
        return round(statistics.median(pair[name] for pair in self.pairs), 2)

    def charged(self) -> dict[str, float]:
        updates = [pieces["charges"] for pieces in self.pieces[-len(self.pairs) :]]
        names = dict.fromkeys(name for charges in updates for name in charges)
        return {name: round(statistics.median(charges.get(name, {}).get("charged_ms", 0.0) for charges in updates), 2) for name in names}

    def bars(self, copy_s: float) -> list[Bar]:
        return [
            Bar(name="gap_excess_ms", value=self.median("excess_ms"), op="<=", bar=round(2e3 * copy_s + 15, 2)),
            Bar(name="aborted", value=self.num_aborted, op="==", bar=0),
            Bar(name="logprob_difference", value=max(self.differences), op="<=", bar=NOISE),
            Bar(name="tokens_lost_share", value=1 - _line.ratio(self.pairs, "tokens_per_s", "tokens_per_s_without"), op="<=", bar=0.03),
        ]

    def notes(self) -> dict[str, Any]:
        updates = self.updates
        return {
            "num_bytes": updates[0].num_bytes, "pause_ms": round(1e3 * statistics.median(u.times.pause_s for u in updates), 2),
            "pieces_ms": {name: round(1e3 * statistics.median(u.times.pieces_s[name] for u in updates), 3) for name in updates[0].times.pieces_s},
            "transfer_ms": round(1e3 * statistics.median(u.transfer_s for u in updates), 1), "worst_excess_ms": round(max(pair["excess_ms"] for pair in self.pairs), 2),
            # What an update adds to the longest gap: of the streams, and of the engine's own steps.
            "excess_added_ms": round(self.median("excess_ms") - self.median("excess_without_ms"), 2), "engine_excess_added_ms": round(self.median("engine_excess_ms") - self.median("engine_excess_without_ms"), 2),
            "engine_excess_ms": self.median("engine_excess_ms"),
            # What steps lost between an update's first piece and its last, and what each piece is charged with: medians over the updates of the pairs.
            "lost_ms": round(statistics.median(pieces["lost_ms"] for pieces in self.pieces[-len(self.pairs) :]), 1), "charged_ms": self.charged(), "stalls": self.stalls, "updates": self.pieces,
        }  # fmt: skip


def keep(path: Path | None, line: dict[str, Any]) -> None:
    """What is known so far, for a run that may be cut off."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps({**line, "partial": True}, indent=1))
        part.replace(path)


async def windows(made: Scene, options: argparse.Namespace) -> tuple[list[Bar], list[Pair], dict[str, Any]]:
    """Pairs of windows under load: (bars, pairs, notes)."""
    stalls, load, found = Stalls(made.engine._engine), Load(made, options.requests, options.streams), Found()
    beat = asyncio.create_task(stalls.loop_beat())
    copy_s = (await made.trainer.ask("copy"))["copy_s"]
    load.start()
    for seed in range(2):  # groups are made, everything has been compiled
        first = await window(made, load, stalls, min(2.0, options.seconds), seed)
        found.pieces.append({"warm_up": True, **first["pieces"]})
        keep(options.partial, {"flat_copy_ms": 1e3 * copy_s, "notes": {"updates": found.pieces}})
        if seed == 0:
            found.differences.append(await difference(made))
    for turn in range(max(options.pairs, _line.MIN_PAIRS)):
        if len(found.pairs) >= 1 and time.monotonic() > _STARTED + options.limit_s:
            print(f"after {len(found.pairs)} pairs no further one is begun (--limit-s)", file=sys.stderr, flush=True)
            break
        order = [True, False] if turn % 2 else [False, True]
        pair = {with_update: await window(made, load, stalls, options.seconds, 10 + turn if with_update else None) for with_update in order}
        found.add(pair[True], pair[False])
        found.num_aborted = load.num_aborted
        keep(options.partial, {"flat_copy_ms": 1e3 * copy_s, "bars": [bar.to_json() for bar in found.bars(copy_s)], "pairs": found.pairs, "notes": found.notes()})
    found.differences.append(await difference(made))
    await load.stop()
    beat.cancel()
    stalls.close()
    found.num_aborted = load.num_aborted
    reason = made.engine.apply_reason
    notes = {"flat_copy_ms": round(1e3 * copy_s, 3), "applied_by": "copies" if not reason else f"loader: {reason}", "in_flight": options.in_flight, "requests": options.requests, "streams": options.streams}
    return found.bars(copy_s), found.pairs, {**notes, **found.notes()}


@asynccontextmanager
async def half_a_gigabyte(options: argparse.Namespace) -> AsyncIterator[Scene]:
    """The scene of a random model of options.hidden and options.layers."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        heads = max(1, options.hidden // 64)
        model = tiny(Path(name) / "model", architecture="qwen3", hidden=options.hidden, layers=options.layers, heads=heads, kv_heads=max(1, heads // 2), head_dim=64, init_std=0.02)
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 512, "gpu_memory_fraction": 0.5, "in_flight": options.in_flight, "enforce_eager": options.eager, "apply": options.apply, "delta_interval_s": 0.0}
        async with scene(model, Path(root), transport=options.transport, device=options.device, **settings) as made:
            yield made


async def measure(options: argparse.Namespace) -> tuple[list[Bar], list[Pair], dict[str, Any]]:
    async with half_a_gigabyte(options) as made:
        return await windows(made, options)


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of the windows and of the scene."""
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="in flight, streams among them")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--in-flight", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--apply", choices=("auto", "loader"), default="auto")
    parser.add_argument("--transport", default="ipc")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="no compilation: a quicker start")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no pair begins later than this after the start; a run of fewer than six has not passed")
    parser.add_argument("--partial", type=Path, default=None, help="a file that holds what was found so far")
    return parser


def main() -> None:
    options = arguments(_line.options(__doc__)).parse_args()
    bars, pairs, notes = asyncio.run(measure(options))
    _line.report("update_pause", bars=bars, pairs=pairs, packages=("torch",), quiet=options.json, notes=notes, finished=len(pairs) >= _line.MIN_PAIRS)


if __name__ == "__main__":
    main()
