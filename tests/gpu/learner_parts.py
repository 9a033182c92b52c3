"""Parts of the learner that only a CUDA device shows: `python -m tests.gpu.learner_parts [--limit-s 80]`. A script, not collected by pytest.

Prints a JSON line for each: a reference that is moved to the CPU between its passes, weights and moments in CPU memory, layers that are computed again,
moments of a byte each, and the head against a kept fused kernel (Liger, where its wheel is installed) and with padding rows left out. On a machine without CUDA
it is rehearsed: small sizes, and of memory and time nothing that means anything.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import _learner_shapes as shapes
from benchmarks import _line
from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.trainer.companion import Companion, Following
from learner.trainer.engine import Engine
from learner.trainer.logprob import Head, token_logprobs
from learner.trainer.model import Policy, load_policy
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.update import train_step
from tests.gpu.learner_speed import model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FLEX: dict[str, Any] = {"attention": "flex", "compile": True, "unit_tokens": 1024} if ON_GPU else {}
HEAD = {"tokens": 16_384, "width": 2048, "classes": 151_936, "padding": 267} if ON_GPU else {"tokens": 256, "width": 32, "classes": 2048, "padding": 267}  # of a 1.7 B model


def settled_bytes() -> int:
    """Bytes held on the device once all its work is done."""
    if ON_GPU:
        torch.cuda.synchronize()
    return torch.cuda.memory_allocated() if ON_GPU else 0


def loaded(folder: Path, mesh: DeviceMesh, **engine: Any) -> Policy:
    return load_policy(folder, mesh=mesh, compute_dtype=torch.bfloat16, temperature=1.0, engine=Engine(**engine))


def made_samples() -> list[Any]:
    """Log-probs as of an even choice among the small model's 611 tokens: far from the policy's own, every ratio would be clipped and no gradient be left."""
    made = shapes.samples(num_groups=3, group_size=4, prompt_tokens=70, median_tokens=60, vocabulary=600)
    return [replace(sample, behaviour=torch.full_like(sample.behaviour, -math.log(611))) for sample in made]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) and tensor.device.type == "cuda" else tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().float().cpu()


def reference(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Log-probs before and after the model has been away, and the memory that comes back."""
    companion = Companion(loaded(folder, mesh, **FLEX), following=Following(), device=DEVICE, offload=ON_GPU)
    rows = [[row.to(DEVICE) for row in pack([WeightedSample(sample=s, advantage=1.0) for s in made_samples()], row_tokens=10_000, share_prefix=True)]]
    at_rest = settled_bytes()
    first, again = companion.logprobs(rows), companion.logprobs(rows)
    stays = loaded(folder, mesh, **FLEX)
    with torch.no_grad():
        expected = [stays(row) for row in rows[0]]
    del stays
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first[0], again[0], expected, strict=True))
    return {"same": same, "bytes_left_on_device": settled_bytes() - at_rest - sum(v.nbytes for v in (*first[0], *again[0], *expected))}


def updated(folder: Path, mesh: DeviceMesh, config: OptimizerConfig, steps: int, **engine: Any) -> dict[str, Any]:
    """Weights after so many updates on the same samples, the bytes that the optimizer keeps, and seconds of the first and of a later step."""
    policy = loaded(folder, mesh, **engine)
    optimizer = Optimizer(policy.causal_lm.named_parameters(), config)
    objective, made, seconds = make_objective(AlgorithmConfig(), max_new_tokens=4096), made_samples(), []
    before = settled_bytes()
    for _ in range(steps):
        began_s = time.perf_counter()
        train_step(policy, optimizer, made, [shapes.minibatch(made)], objective=objective, row_tokens=10_000, share_prefix=True)
        settled_bytes()
        seconds.append(time.perf_counter() - began_s)
    kept = settled_bytes() - before
    return {"weights": torch.cat([whole(p).flatten() for p in policy.parameters()]), "kept_bytes": kept, "first_s": round(seconds[0], 2), "later_s": round(seconds[-1], 4)}


def apart(found: dict[str, Any], plain: dict[str, Any], start: Tensor) -> dict[str, Any]:
    """How far the weights are from the plain ones, relative to how far those have moved."""
    moved = (plain["weights"] - start).norm()
    assert float(moved) > 0, "nothing was learned: there is nothing to compare"
    return {"apart": float((found["weights"] - plain["weights"]).norm() / moved), **{key: value for key, value in found.items() if key != "weights"}}


def head(repeats: int = 7) -> dict[str, Any]:
    """Forward and backward of log-probs of 16,384 tokens in a 1.7 B model's head: milliseconds and peak GiB on top, ours (all rows, and without the padding) and Liger's, and how
    far Liger's are from ours."""
    torch.manual_seed(0)
    tokens, width, classes = HEAD["tokens"], HEAD["width"], HEAD["classes"]
    hidden, weight = (torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16).mul_(scale).requires_grad_() for rows, scale in ((tokens, 1.0), (classes, 0.02)))
    target, slope = torch.randint(0, classes - HEAD["padding"], (tokens,), device=DEVICE), torch.randn(tokens, device=DEVICE)
    padding = tuple(range(classes - HEAD["padding"], classes))
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: token_logprobs(hidden, weight, None, target, head=Head(temperature=1.0, fused=ON_GPU)),
        "without_padding": lambda: token_logprobs(hidden, weight, None, target, head=Head(temperature=1.0, fused=ON_GPU, without_text=padding)),
    }
    if ON_GPU and importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
        ways["liger"] = lambda: -liger(hidden, weight, target, reduction="none")
    result: dict[str, Any] = {}
    outcomes: dict[str, tuple[Tensor, ...]] = {}
    for name, way in ways.items():
        result[name], outcomes[name] = measured_head(way, hidden, weight, slope, repeats)
        _line.tell({name: result[name]})
    result["padding_gradient"] = float(outcomes["without_padding"][2][-HEAD["padding"] :].abs().max())
    if "liger" in outcomes:
        result["apart"] = [float((a - b).norm() / b.norm()) for a, b in zip(outcomes["liger"], outcomes["ours"], strict=True)]
    return result


def measured_head(way: Callable[[], Tensor], hidden: Tensor, weight: Tensor, slope: Tensor, repeats: int) -> tuple[dict[str, float], tuple[Tensor, ...]]:
    """Of one way: milliseconds and GiB on top; log-probs and both gradients."""
    times, peak = [], 0
    for _ in range(repeats + 2):
        hidden.grad = weight.grad = None
        before, began_s = settled_bytes(), time.perf_counter()
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        values = way()
        (values.float() * slope).sum().backward()
        settled_bytes()
        times.append(time.perf_counter() - began_s)
        peak = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    assert hidden.grad is not None and weight.grad is not None
    seen = {"ms": round(1000 * statistics.median(times[2:] or times), 1), "peak_gib_on_top": round(peak / 2**30, 2)}
    return seen, (values.detach().float(), hidden.grad.float(), weight.grad.float())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-s", type=float, default=600.0, help="no part begins after so many seconds")
    until_s = time.monotonic() + parser.parse_args().limit_s
    _line.watch(20.0)
    with tempfile.TemporaryDirectory() as name:
        if ON_GPU:
            torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", init_method=f"file://{Path(name) / 'store'}", rank=0, world_size=1)
        mesh = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("shard",))
        folder = model(Path(name) / "model", "Qwen3", hidden_size=256, num_hidden_layers=4, initializer_range=0.05)
        start = torch.cat([whole(p).flatten() for p in loaded(folder, mesh).parameters()])
        plain: dict[str, Any] = {}

        def against(config: OptimizerConfig, **engine: Any) -> dict[str, Any]:
            return apart(updated(folder, mesh, config, 4, **engine), plain, start)

        adamw = OptimizerConfig(lr=1e-3)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "head": head,
            "reference": lambda: reference(folder, mesh),
            "plain": lambda: plain.update(updated(folder, mesh, adamw, 4, **FLEX)) or {key: value for key, value in plain.items() if key != "weights"},
            "again": lambda: against(adamw, **FLEX),  # the same once more: what two runs are apart
            "recompute selective": lambda: against(adamw, **FLEX, recompute="selective"),
            "offload": lambda: against(adamw, **FLEX, offload=ON_GPU),
            "adamw_8bit": lambda: against(OptimizerConfig(lr=1e-3, kind="adamw_8bit"), **FLEX),
        }
        for part, work in parts.items():
            began_s = time.perf_counter()
            try:
                found: Any = work() if time.monotonic() < until_s else "left out: no time"
            except Exception as error:
                found = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps({part: found, "seconds": round(time.perf_counter() - began_s, 1)}), flush=True)
            if ON_GPU:
                torch.cuda.empty_cache()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
