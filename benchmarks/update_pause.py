"""What a weight update costs those who wait for tokens, on a GPU: `python -m benchmarks.update_pause --json`.

A random 0.47 B model served by vLLM with 256 requests in flight; a trainer process on the same GPU sends a version every 5 s by CUDA
IPC, beside generation. Windows of 5 s with one update and without any take turns. A gap is the time between two messages of one
stream; the excess of a window is its longest gap less the median gap. Peer: one flat device copy of the same bytes.
`--device cpu --transport gloo --hidden 64 --layers 2` goes through the same motions on a CPU; its bars mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks import _line
from benchmarks._line import Bar, Pair
from benchmarks._update_scene import Scene, scene
from deploy.models import tiny
from rollout_server.engine import SamplingSpec

NUM_STREAMS, NEW_TOKENS, PROMPT_TOKENS = 256, 1024, 64


class Load:
    """Streams that go on for ever, each request followed by another. `gaps_s` and `num_tokens` are of the present window."""

    def __init__(self, made: Scene, num_streams: int) -> None:
        self._made = made
        self._num_streams = num_streams
        self.gaps_s: list[float] = []
        self.num_tokens = 0
        self.num_aborted = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(self._num_streams)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what ended a stream."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self, number: int) -> None:
        now_s, turn = asyncio.get_running_loop().time, 0
        draw = random.Random(number)
        while True:
            prompt = [draw.randrange(3, 200) for _ in range(PROMPT_TOKENS)]
            turn += 1
            # Lengths differ, so that requests do not all end at once.
            sampling = SamplingSpec(temperature=1.0, max_new_tokens=draw.randrange(NEW_TOKENS // 2, NEW_TOKENS), seed=number + 1000 * turn)
            last_s = 0.0
            async with aclosing(self._made.engine.generate(prompt, sampling, f"{number}-{turn}")) as deltas:
                async for delta in deltas:
                    at_s = now_s()
                    if last_s:
                        self.gaps_s.append(at_s - last_s)
                    last_s = at_s
                    self.num_tokens += len(delta.token_ids)
                    self.num_aborted += delta.finish == "abort"


async def window(made: Scene, load: Load, seconds: float, seed: int | None) -> dict[str, Any]:
    """One window; with a seed one update, begun at its start."""
    loop = asyncio.get_running_loop()
    load.gaps_s, load.num_tokens, began = [], 0, loop.time()
    update = await made.update(seed) if seed is not None else None
    await asyncio.sleep(max(0.0, seconds - (loop.time() - began)))
    load.check()
    took_s = loop.time() - began
    return {"rate": load.num_tokens / took_s, "excess_s": max(load.gaps_s) - statistics.median(load.gaps_s), "update": update, "median_s": statistics.median(load.gaps_s)}


async def measure(options: argparse.Namespace) -> tuple[list[Bar], list[Pair], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        heads = max(1, options.hidden // 64)
        model = tiny(Path(name) / "model", architecture="qwen3", hidden=options.hidden, layers=options.layers, heads=heads, kv_heads=max(1, heads // 2), head_dim=64, init_std=0.02)
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 512, "gpu_memory_fraction": 0.5, "in_flight": options.in_flight, "enforce_eager": options.eager, "apply": options.apply}
        async with scene(model, Path(root), transport=options.transport, device=options.device, **settings) as made:
            load = Load(made, options.streams)
            load.start()
            for seed in range(2):  # groups are made, everything has been compiled
                await window(made, load, options.seconds, seed)
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
            await load.stop()
            aborted, reason = load.num_aborted, made.engine.apply_reason
    bars = [
        Bar(name="gap_excess_ms", value=statistics.median(pair["excess_ms"] for pair in pairs), op="<=", bar=round(2e3 * copy_s + 15, 2)),
        Bar(name="aborted", value=aborted, op="==", bar=0),
        Bar(name="tokens_lost_share", value=1 - _line.ratio(pairs, "tokens_per_s", "tokens_per_s_without"), op="<=", bar=0.03),
    ]
    pieces = {name: round(1e3 * statistics.median(u.times.pieces_s[name] for u in updates), 3) for name in updates[0].times.pieces_s}
    notes = {
        "flat_copy_ms": round(1e3 * copy_s, 3), "num_bytes": updates[0].num_bytes, "pause_ms": round(1e3 * statistics.median(u.times.pause_s for u in updates), 2), "pieces_ms": pieces,
        "transfer_ms": round(1e3 * statistics.median(u.transfer_s for u in updates), 1), "applied_by": "copies" if not reason else f"loader: {reason}", "in_flight": options.in_flight,
        "worst_excess_ms": round(max(pair["excess_ms"] for pair in pairs), 2), "streams": options.streams,
    }  # fmt: skip
    return bars, pairs, notes


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
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
