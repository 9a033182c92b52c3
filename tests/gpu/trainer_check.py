"""The trainer on one CUDA device, without the services: `python tests/gpu/trainer_check.py`. Prints one JSON line last.

Checks packed log-probs against transformers in float32, a bfloat16 update on float32 master weights, and the speed of a
step. Run where the trainer's newest and oldest torch and transformers are to be tried.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.trainer.model import load_policy
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.update import train_step
from tests.learner.trainer import rig


def main() -> None:
    found: dict[str, object] = {"torch": torch.__version__, "transformers": transformers.__version__, "device": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
        found["max_logprob_error_float32"] = logprob_error(folder, mesh)
        found |= speed(folder, mesh)
        dist.destroy_process_group()
    print(json.dumps(found))


def logprob_error(folder: Path, mesh: dist.DeviceMesh) -> float:
    """Largest difference of packed log-probs on the device from transformers' unpacked ones on the CPU."""
    model = rig.llama(folder / "llama")
    made = rig.samples(3, 4)
    policy = load_policy(model, mesh=mesh, compute_dtype=torch.float32, temperature=rig.TEMPERATURE)
    reference = {float(b): float(lp) for s in made for b, lp in zip(s.behaviour, rig.reference_logprobs(model, s), strict=True)}
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=40, share_prefix=True)
    return max(abs(float(lp) - reference[float(b)]) for row in rows for lp, b in zip(policy(row.to(torch.device("cuda"))).detach().cpu(), row.behaviour, strict=True))


def speed(folder: Path, mesh: dist.DeviceMesh, *, groups: int = 16, group_size: int = 8, completion: int = 240) -> dict[str, object]:
    """Steps of a random 0.5 B model: seconds a step, trained tokens a second, peak memory, and that weights stay float32."""
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "half")
    policy = load_policy(folder / "half", mesh=mesh, compute_dtype=torch.bfloat16, temperature=1.0)
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-6))
    made = [replace(s, completion_ids=torch.randint(0, 150_000, (completion,)), behaviour=torch.full((completion,), -11.9), loss_mask=torch.ones(completion, dtype=torch.bool)) for s in rig.samples(groups, group_size)]
    objective = make_objective(AlgorithmConfig(), max_new_tokens=completion)
    minibatches = objective.minibatches(rig.entries(made), num=1)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.monotonic()
        result = train_step(policy, optimizer, made, minibatches, objective=objective, row_tokens=8192, share_prefix=True)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    return {
        "step_s": round(min(seconds), 4), "tokens_per_s": round(len(made) * completion / min(seconds)), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "grad_norm": result.updates[0].grad_norm, "master_dtypes": sorted({str(p.dtype) for p in policy.parameters()}),
    }  # fmt: skip


if __name__ == "__main__":
    main()
