"""A separate process's opinion: log-probs of given completions by plain transformers on weights read from a run's cuts.

    python -m tests.system.fresh REQUEST.json ANSWER.json [--device cuda]

REQUEST: {"model": base folder, "checkpoints": folder of cuts, "dtype": "float32", "samples": [{"prompt": [ids], "completion": [ids],
"spans": [[policy step, start, end], ...]}]}. ANSWER: {"logprobs": [[per token], ...]}; each token is evaluated by a whole forward pass under
the weights of its span's step. Step 0 is the base model. Knows nothing of the trainer's code: it reads the checkpoint as tensors by name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM


def load(base: Path, checkpoints: Path, step: int, dtype: torch.dtype, device: str) -> Any:
    """The base model with the named parameters of one cut."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if step > 0:
        weights = dict(model.named_parameters())  # a tied head is no name of its own
        dcp.load({"model": {name: parameter.data for name, parameter in weights.items()}}, checkpoint_id=checkpoints / f"step-{step:06d}", no_dist=True)
    return model.to(device=device, dtype=dtype).eval()


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    device = next(model.parameters()).device
    logits = model(torch.tensor([prompt + completion], device=device)).logits[0].float() / temperature
    table = torch.log_softmax(logits, -1)
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    request = json.loads(args.request.read_text())
    samples = request["samples"]
    answers: list[list[float | None]] = [[None] * len(sample["completion"]) for sample in samples]
    for step in sorted({span[0] for sample in samples for span in sample["spans"]}):
        model = load(Path(request["model"]), Path(request["checkpoints"]), step, getattr(torch, request["dtype"]), args.device)
        for sample, answer in zip(samples, answers, strict=True):
            spans = [span for span in sample["spans"] if span[0] == step]
            values = logprobs(model, sample["prompt"], sample["completion"]) if spans else []
            for _, start, end in spans:
                answer[start:end] = values[start:end]
    assert all(value is not None for answer in answers for value in answer), "spans do not cover the completions"
    args.answer.write_text(json.dumps({"logprobs": answers}))


if __name__ == "__main__":
    main()
