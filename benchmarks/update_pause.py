"""What a weight update costs those who wait for tokens, on a GPU: `python -m benchmarks.update_pause --json`.

A random model of half a gigabyte served by vLLM with 256 requests in flight, 240 of them as an actor draws them (one message at the end) and
16 as streams; a trainer process on the same GPU sends a version every 5 s by CUDA IPC, beside generation. Windows of 5 s with one
update and without any take turns. A gap is the time between two messages of one stream; the excess of a window is its longest gap
less the median gap. Peer: one flat device copy of the same bytes. Tokens are counted as they leave the engine. After the first and the
last update a sample's log-probs are held against the trainer's own forward pass. Progress goes to stderr, a JSON line a window.
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
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks import _line
from benchmarks._line import Bar, Pair
from benchmarks._update_scene import Scene, scene
from deploy.models import tiny
from rollout_server.engine import SamplingSpec

NUM_REQUESTS, NUM_STREAMS, NEW_TOKENS, PROMPT_TOKENS = 256, 16, 1024, 64
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


async def window(made: Scene, load: Load, seconds: float, seed: int | None) -> dict[str, Any]:
    """One window; with a seed one update, begun at its start."""
    loop = asyncio.get_running_loop()
    load.gaps_s, tokens, began = [], load.num_tokens, loop.time()
    update = await made.update(seed) if seed is not None else None
    await asyncio.sleep(max(0.0, seconds - (loop.time() - began)))
    load.check()
    took_s = loop.time() - began
    found = {"rate": (load.num_tokens - tokens) / took_s, "excess_s": max(load.gaps_s) - statistics.median(load.gaps_s), "median_s": statistics.median(load.gaps_s)}
    pieces = {} if update is None else {"pause_s": update.times.pause_s, "transfer_s": update.transfer_s, **update.times.pieces_s}
    print(json.dumps({**found, **pieces}), file=sys.stderr, flush=True)
    return {**found, "update": update}


async def difference(made: Scene) -> float:
    """Mean absolute difference of a fresh sample's log-probs from the trainer's."""
    prompt = [random.randrange(3, 200) for _ in range(32)]
    (delta,) = [d async for d in made.engine.generate(prompt, SamplingSpec(temperature=1.0, max_new_tokens=64, seed=1), "check", stream=False)]
    theirs = (await made.trainer.ask("logprobs " + ",".join(map(str, [*prompt, *delta.token_ids]))))["logprobs"][-64:]
    return float(sum(abs(a - b) for a, b in zip(delta.logprobs, theirs, strict=True)) / 64)


async def measure(options: argparse.Namespace) -> tuple[list[Bar], list[Pair], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        heads = max(1, options.hidden // 64)
        model = tiny(Path(name) / "model", architecture="qwen3", hidden=options.hidden, layers=options.layers, heads=heads, kv_heads=max(1, heads // 2), head_dim=64, init_std=0.02)
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 512, "gpu_memory_fraction": 0.5, "in_flight": options.in_flight, "enforce_eager": options.eager, "apply": options.apply}
        async with scene(model, Path(root), transport=options.transport, device=options.device, **settings) as made:
            load = Load(made, options.requests, options.streams)
            load.start()
            await window(made, load, 2.0, 0)  # groups are made, everything has been compiled
            differences = [await difference(made)]
            await window(made, load, 2.0, 1)
            pairs, updates = [], []
            for turn in range(max(options.pairs, _line.MIN_PAIRS)):
                order = [True, False] if turn % 2 else [False, True]
                found = {with_update: await window(made, load, options.seconds, 10 + turn if with_update else None) for with_update in order}
                updates.append(found[True]["update"])
                pairs.append({
                    "excess_ms": 1e3 * found[True]["excess_s"], "excess_without_ms": 1e3 * found[False]["excess_s"], "tokens_per_s": found[True]["rate"],
                    "tokens_per_s_without": found[False]["rate"], "median_gap_ms": 1e3 * found[False]["median_s"],
                })  # fmt: skip
            copy_s = (await made.trainer.ask("copy"))["copy_s"] if options.device == "cuda" else 0.0
            differences.append(await difference(made))
            await load.stop()
            aborted, reason = load.num_aborted, made.engine.apply_reason
    bars = [
        Bar(name="gap_excess_ms", value=statistics.median(pair["excess_ms"] for pair in pairs), op="<=", bar=round(2e3 * copy_s + 15, 2)),
        Bar(name="aborted", value=aborted, op="==", bar=0),
        Bar(name="logprob_difference", value=max(differences), op="<=", bar=NOISE),
        Bar(name="tokens_lost_share", value=1 - _line.ratio(pairs, "tokens_per_s", "tokens_per_s_without"), op="<=", bar=0.03),
    ]
    pieces = {name: round(1e3 * statistics.median(u.times.pieces_s[name] for u in updates), 3) for name in updates[0].times.pieces_s}
    notes = {
        "flat_copy_ms": round(1e3 * copy_s, 3), "num_bytes": updates[0].num_bytes, "pause_ms": round(1e3 * statistics.median(u.times.pause_s for u in updates), 2), "pieces_ms": pieces,
        "transfer_ms": round(1e3 * statistics.median(u.transfer_s for u in updates), 1), "applied_by": "copies" if not reason else f"loader: {reason}", "in_flight": options.in_flight,
        "worst_excess_ms": round(max(pair["excess_ms"] for pair in pairs), 2), "requests": options.requests, "streams": options.streams,
    }  # fmt: skip
    return bars, pairs, notes


def main() -> None:
    parser = _line.options(__doc__)
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
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    bars, pairs, notes = asyncio.run(measure(options))
    _line.report("update_pause", bars=bars, pairs=pairs, packages=("torch",), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
