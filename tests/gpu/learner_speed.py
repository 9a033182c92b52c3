"""The learner's fast path on one CUDA device: `python -m tests.gpu.learner_speed [--profile 1.7B] [--limit-s 120]`. A script, not collected by pytest.
On a machine without one it is rehearsed: the same cases, all with small dense attentions.

Prints a JSON line for each part: flex attention against small dense attentions in float32 (values and gradients, windows and soft caps too), bfloat16
against float32, and where a step's time on the device goes, by kernel.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import _learner_shapes as shapes
from benchmarks import _line
from benchmarks.learner import H200_FLOPS, Ours, timed
from learner.trainer.engine import Engine
from learner.trainer.model import load_policy
from learner.trainer.packing import WeightedSample, pack

GROUPS = {"matrix products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "s16816"), "attention": ("flex_attention", "attention"), "optimizer": ("adam", "multi_tensor", "foreach"), "copies": ("memcpy", "memset", "copy", "all_gather", "chunk_cat", "split_with_sizes", "nccl"), "compiled": ("triton_",)}


def model(folder: Path, architecture: str, **more: Any) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 611, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.2}
    config = getattr(transformers, f"{architecture}Config")(**{**sizes, **more})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def outcome(folder: Path, mesh: DeviceMesh, engine: Engine, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a packed row, and the gradient of their sum, flattened."""
    policy = load_policy(folder, mesh=mesh, compute_dtype=dtype, temperature=0.7, engine=engine)
    made = shapes.samples(num_groups=3, group_size=4, prompt_tokens=70, median_tokens=60, vocabulary=600)
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=10_000, share_prefix=True)
    found = []
    for row in rows:
        values = policy(row.to(torch.device(mesh.device_type)), with_entropy=True)
        (values * torch.linspace(-1, 1, values.shape[1], device=values.device)).sum().backward()
        found.append(values.detach().flatten())
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in policy.parameters() if p.grad is not None]
    return torch.cat(found).cpu(), torch.cat([g.flatten() for g in grads]).cpu()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 50, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32}),
}
ORDER = (
    ("qwen3", "flex", torch.float32), ("qwen3", "flex", torch.bfloat16), ("qwen3", "pieces", torch.bfloat16),
    ("gemma2", "flex", torch.bfloat16), ("gemma2", "pieces", torch.bfloat16), ("gemma2", "flex", torch.float32),
)  # fmt: skip


def agreement(folder: Path, mesh: DeviceMesh, until_s: float, only: str = "") -> dict[str, Any]:
    """Largest differences from small dense attentions in float32, of gradients relative to the largest one, and the lengths of the difference relative to the whole."""
    result: dict[str, Any] = {}
    fast = Engine(attention="flex", compile=True, unit_tokens=1024) if mesh.device_type == "cuda" else Engine()
    known: dict[str, tuple[Tensor, Tensor]] = {}
    for name, label, dtype in (case for case in ORDER if case[0].startswith(only)):
        key = f"{name}, {label} {str(dtype).removeprefix('torch.')}"
        if time.monotonic() > until_s:
            result[key] = "left out: no time"
            continue
        if name not in known:
            architecture, more = CASES[name]
            known[name] = outcome(model(folder / name, architecture, **more), mesh, Engine(), torch.float32)
        values, gradient = known[name]
        began_s = time.perf_counter()
        other, slope = outcome(folder / name, mesh, fast if label == "flex" else Engine(), dtype)
        off = slope - gradient
        result[key] = {"value": float((other - values).abs().max()), "gradient": float(off.abs().max() / gradient.abs().max()), "gradient_norm": float(off.norm() / gradient.norm()), "seconds": round(time.perf_counter() - began_s, 1)}
        print(json.dumps({key: result[key]}), flush=True)  # a run may be cut off
    return result


def where_time_goes(name: str, mesh: DeviceMesh, num_tokens: int) -> dict[str, Any]:
    """Milliseconds on the device of one step, by kind of kernel, and the wall time."""
    ours = Ours(name, mesh, row_tokens=num_tokens)
    made = shapes.one_row(num_tokens, prompt_tokens=64, vocabulary=150_000)
    for _ in range(3):
        ours.step(made)
    seconds = sorted(timed(lambda: ours.step(made), torch.device("cuda")) for _ in range(7))[3]
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=num_tokens, share_prefix=True)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        began_s = time.perf_counter()
        ours.step(made)
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began_s
    kernels = {e.key: e.self_device_time_total / 1000 for e in seen.key_averages() if e.self_device_time_total > 0 and str(e.device_type).endswith("CUDA")}
    groups: dict[str, float] = {}
    for key, value in kernels.items():
        kind = next((group for group, words in GROUPS.items() if any(word in key.lower() for word in words)), "other")
        groups[kind] = groups.get(kind, 0.0) + value
    top = sorted(kernels.items(), key=lambda item: -item[1])[:22]
    return {"model": name, "step_ms": round(seconds * 1000, 1), "mfu": round(shapes.flops(ours.config, rows) / seconds / H200_FLOPS, 4), "wall_ms": round(wall_s * 1000, 1), "device_ms": round(sum(kernels.values()), 1), "by_kind_ms": {k: round(v, 1) for k, v in groups.items()}, "top_ms": {key[:90]: round(value, 2) for key, value in top}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="", help="shape whose step is profiled")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--only", default="", help="cases of the agreement that begin with this, for instance gemma2")
    parser.add_argument("--limit-s", type=float, default=600.0, help="no part begins after so many seconds; what hangs is told by its stack")
    options = parser.parse_args()
    until_s = time.monotonic() + options.limit_s
    _line.watch(20.0)
    with tempfile.TemporaryDirectory() as name:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{Path(name) / 'store'}", rank=0, world_size=1)
        mesh = init_device_mesh("cuda" if cuda else "cpu", (1,), mesh_dim_names=("shard",))
        print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu: a rehearsal"}), flush=True)
        parts: dict[str, Callable[[], dict[str, Any]]] = {"agreement": lambda: agreement(Path(name), mesh, until_s, options.only)}
        if options.profile:
            parts["profile"] = lambda: where_time_goes(options.profile, mesh, options.tokens)
        for part, work in parts.items():
            began_s = time.perf_counter()
            try:
                print(json.dumps({part: work() if time.monotonic() < until_s else "left out: no time", "seconds": round(time.perf_counter() - began_s, 1)}), flush=True)
            except Exception as error:
                print(json.dumps({part: f"{type(error).__name__}: {error}"[:3000]}), flush=True)
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
