"""Model scorers on CUDA: `python -m tests.gpu.reward_model [--devices cuda:0,cuda:1] [--hidden 1024 --layers 24]`. A script, not collected by pytest.

`--devices cpu,cpu --hidden 64 --layers 2 --items 60` tries the script itself without a GPU. Prints one JSON line last: how far scores on the device are from those on the CPU (float32 and bfloat16), that yes/no and number verdicts work,
scores a second of one caller and of many at once (batched over callers), of every replica together, and of one replica split over all devices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from deploy.models import tiny
from reward_server.models.front import Front
from reward_server.models.spec import ModelSpec

WORDS = ["the", "answer", "is", "that", "one", "and", "one", "make", "two", "so", "it", "should", "be", "right", "but", "let", "me", "check", "once", "more"]

ONE_BY_ONE = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default=",".join(f"cuda:{index}" for index in range(torch.cuda.device_count())))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--items", type=int, default=2000)
    options = parser.parse_args()
    devices = tuple(options.devices.split(","))
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "device": torch.cuda.get_device_name() if devices[0].startswith("cuda") else devices[0], "devices": len(devices)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = classifier(folder, 64, 2), classifier(folder, options.hidden, options.layers)
        items = conversations(options.items)
        cpu = asked(spec(small, ("cpu",)), items[:64])
        for dtype in ("float32", "bfloat16"):
            device = asked(spec(small, devices[:1], dtype=dtype), items[:64])
            found[f"largest_difference_{dtype}"] = max(abs(a - b) for a, b in zip(cpu, device, strict=True))
        found["spread_of_scores"] = max(cpu) - min(cpu)
        found |= speeds(large, devices, items)
        found |= verdicts(folder / "causal-64", devices[0], items[:32])
    print(json.dumps(found))


def conversations(count: int) -> list[tuple[str, str]]:
    """Prompts and completions of 20 to 400 words, some 100 to 2000 bytes: tokens of the byte-level model."""
    draw = random.Random(0)
    return [(" ".join(draw.choices(WORDS, k=12)), " ".join(draw.choices(WORDS, k=draw.randint(20, 400)))) for _ in range(count)]


def classifier(folder: Path, hidden: int, layers: int) -> Path:
    """A random Llama with a one-label head; heads of 64 (or 32), as many key-value heads as make 8 at most."""
    heads = max(4, hidden // 64)
    base = tiny(folder / f"causal-{hidden}", hidden=hidden, layers=layers, heads=heads, kv_heads=min(heads, 8), head_dim=max(32, hidden // heads))
    torch.manual_seed(7)
    made = folder / f"classifier-{hidden}"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(made)
    return made


def spec(model: Path, devices: tuple[str, ...], **more: Any) -> ModelSpec:
    return ModelSpec(**{"kind": "classification", "model": str(model), "devices": devices, "dtype": "float32", **more})


def asked(of: ModelSpec, items: list[tuple[str, str]]) -> list[float]:
    """Scores of all items, asked at once."""
    return asyncio.run(_asked(of, items))[0]


async def _asked(of: ModelSpec, items: list[tuple[str, str]], *, one_by_one: int = 0) -> tuple[list[float], float, float]:
    """(scores, seconds for all at once, seconds for `one_by_one` of them one after the other)."""
    front = Front(of, batch_limit_s=300.0)
    await asyncio.to_thread(front.start)
    try:
        await asyncio.gather(*(front.score(*item) for item in items[:64]))  # warm
        began_s = time.monotonic()
        scores = await asyncio.gather(*(front.score(*item) for item in items))
        all_s = time.monotonic() - began_s
        began_s = time.monotonic()
        for item in items[:one_by_one]:
            await front.score(*item)
        return [float(score) for score in scores], all_s, time.monotonic() - began_s
    finally:
        await front.stop()


def speeds(model: Path, devices: tuple[str, ...], items: list[tuple[str, str]]) -> dict[str, Any]:
    """Scores a second, and that splitting changes no score beyond bfloat16's grain."""
    found: dict[str, Any] = {}
    reference, all_s, single_s = asyncio.run(_asked(spec(model, devices[:1], dtype="bfloat16"), items, one_by_one=ONE_BY_ONE))
    found["scores_per_s"] = len(items) / all_s
    found["scores_per_s_one_by_one"] = min(ONE_BY_ONE, len(items)) / single_s
    if len(devices) > 1:
        scores, all_s, _ = asyncio.run(_asked(spec(model, devices, dtype="bfloat16"), items))
        found["scores_per_s_replicas"] = len(items) / all_s
        found["largest_difference_replicas"] = max(abs(a - b) for a, b in zip(reference, scores, strict=True))
        scores, all_s, _ = asyncio.run(_asked(spec(model, devices, dtype="bfloat16", tensor_parallel=len(devices)), items))
        found["scores_per_s_tensor_parallel"] = len(items) / all_s
        found["largest_difference_tensor_parallel"] = max(abs(a - b) for a, b in zip(reference, scores, strict=True))
    return found


def verdicts(model: Path, device: str, items: list[tuple[str, str]]) -> dict[str, Any]:
    """That both generative verdicts answer on the device as on the CPU."""
    template = "{{ prompt }}|{{ completion }}"
    chances = [asked(spec(model, (where,), kind="yes_no", template=template), items) for where in ("cpu", device)]
    front = Front(spec(model, (device,), kind="number", template=template, max_new_tokens=8), batch_limit_s=300.0)

    async def numbers() -> list[float | str]:
        await asyncio.to_thread(front.start)
        try:
            return await asyncio.gather(*(front.score(*item) for item in items))
        finally:
            await front.stop()

    return {"largest_difference_yes_no": max(abs(a - b) for a, b in zip(*chances, strict=True)), "number_answers": len(asyncio.run(numbers()))}


if __name__ == "__main__":
    main()
