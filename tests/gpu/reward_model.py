"""Model scorers on CUDA: `python -m tests.gpu.reward_model [--devices cuda:0,cuda:1] [--hidden 1024 --layers 24]`. A script, not collected by pytest.

`--devices cpu,cpu --hidden 64 --layers 2 --items 60` tries the script itself without a GPU. Prints a JSON line after each part, each with all that is known so far: how far scores on the device are from those on the CPU (float32 and bfloat16), that yes/no and number verdicts
work, that a reward server on the device gives the same scores over gRPC, scores a second of one caller and of many at once (batched over callers), of every replica together, and of one
replica split over all devices. Needs torch, transformers, grpcio, pydantic, msgpack, uvloop, prometheus-client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from deploy.models import tiny
from protos import rpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
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
    parser.add_argument("--parts", default="agreement,served,speed", help="those to run")
    options = parser.parse_args()
    devices, parts = tuple(options.devices.split(",")), options.parts.split(",")
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "device": torch.cuda.get_device_name() if devices[0].startswith("cuda") else devices[0], "devices": len(devices)}
    began_s = time.monotonic()

    def told(more: dict[str, Any]) -> None:
        found.update(more)
        print(json.dumps({**found, "seconds": round(time.monotonic() - began_s, 1)}), flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = classifier(folder, 64, 2)
        items = conversations(options.items)
        if "agreement" in parts:
            told(asyncio.run(agreement(small, folder / "causal-64", devices[0], items)))
        if "served" in parts:
            told(served(folder, small, devices, items[:64]))
        if "speed" in parts:
            for more in speeds(classifier(folder, options.hidden, options.layers), devices, items):
                told(more)
    told({"complete": True})


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


async def answered(of: ModelSpec, items: list[tuple[str, str]]) -> list[float | str]:
    """Answers to all items, asked at once."""
    front = Front(of, batch_limit_s=300.0)
    await asyncio.to_thread(front.start)
    try:
        return await asyncio.gather(*(front.score(*item) for item in items))
    finally:
        await front.stop()


async def agreement(small: Path, causal: Path, device: str, items: list[tuple[str, str]]) -> dict[str, Any]:
    """How far the device is from the CPU: scores in both types, and verdicts. All models are loaded at once."""
    template = "{{ prompt }}|{{ completion }}"
    yes_no = {"kind": "yes_no", "template": template}
    cpu, single, half, chance, chance_there, numbers = await asyncio.gather(
        answered(spec(small, ("cpu",)), items[:64]),
        answered(spec(small, (device,)), items[:64]),
        answered(spec(small, (device,), dtype="bfloat16"), items[:64]),
        answered(spec(causal, ("cpu",), **yes_no), items[:32]),
        answered(spec(causal, (device,), **yes_no), items[:32]),
        answered(spec(causal, (device,), kind="number", template=template, max_new_tokens=8), items[:32]),
    )
    return {
        "largest_difference_float32": farthest(cpu, single),
        "largest_difference_bfloat16": farthest(cpu, half),
        "spread_of_scores": max(map(float, cpu)) - min(map(float, cpu)),
        "largest_difference_yes_no": farthest(chance, chance_there),
        "number_answers": len(numbers),
    }


def farthest(some: list[float | str], others: list[float | str]) -> float:
    """Largest difference. Raises ValueError where one has no score."""
    return max(abs(float(a) - float(b)) for a, b in zip(some, others, strict=True))


def served(folder: Path, model: Path, devices: tuple[str, ...], items: list[tuple[str, str]]) -> dict[str, Any]:
    """The whole way: a reward server with the scorer `reward_model` on the devices, asked over gRPC."""
    args = {"model": str(model), "devices": list(devices), "dtype": "float32"}
    (folder / "reward.yaml").write_text(json.dumps({"scorers": [{"name": "preference", "use": "reward_model", "limit_s": 60, "args": args}]}))
    root = Path(__file__).resolve().parents[2]
    path = ":".join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen([sys.executable, "-m", "reward_server", "--config", "reward.yaml", "--address-file", "address"], cwd=folder, env={**os.environ, "PYTHONPATH": path})
    try:
        until_s = time.monotonic() + 60
        while not (folder / "address").exists():
            if process.poll() is not None or time.monotonic() > until_s:
                return {"served": f"the reward server did not start: {process.poll()}"}
            time.sleep(0.1)
        scores = asyncio.run(_over_the_wire((folder / "address").read_text(), items))
        process.terminate()
        return {"served": sum(isinstance(each, float) for each in scores), "served_of": len(items), "largest_difference_served": farthest(scores, asyncio.run(answered(spec(model, ("cpu",)), items))), "stopped_with": process.wait(15)}
    finally:
        process.kill()
        process.wait()


async def _over_the_wire(address: str, items: list[tuple[str, str]]) -> list[float | str]:
    requests = [reward_pb2.ScoreRequest(id=str(index), scorer="preference", prompt=prompt, completion=completion) for index, (prompt, completion) in enumerate(items)]
    async with rpc.channel(address) as channel:
        answers = {answer.id: answer async for answer in reward_pb2_grpc.RewardServiceStub(channel).Score(iter(requests), timeout=60)}
    return [answers[each.id].reward.score.value if answers[each.id].reward.HasField("score") else str(answers[each.id].reward.unscored) for each in requests]


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


def speeds(model: Path, devices: tuple[str, ...], items: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Scores a second, and that splitting changes no score beyond bfloat16's grain."""
    reference, all_s, single_s = asyncio.run(_asked(spec(model, devices[:1], dtype="bfloat16"), items, one_by_one=ONE_BY_ONE))
    yield {"scores_per_s": len(items) / all_s, "scores_per_s_one_by_one": min(ONE_BY_ONE, len(items)) / single_s}
    for name, tensor_parallel in (("replicas", 1), ("tensor_parallel", len(devices))) if len(devices) > 1 else ():
        scores, all_s, _ = asyncio.run(_asked(spec(model, devices, dtype="bfloat16", tensor_parallel=tensor_parallel), items))
        yield {f"scores_per_s_{name}": len(items) / all_s, f"largest_difference_{name}": farthest([*reference], [*scores])}


if __name__ == "__main__":
    main()
