"""`python -m deploy.demo.tool_warm_up FOLDER SEED STEPS PAIRS.json`: a tiny Llama that has seen a calculator being asked a few times.

Supervised steps are few on purpose: the model sometimes asks and sometimes copies the result right, so that reinforcement has something to
reward and much to improve. A process of its own, since it needs torch.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.demo.sums import turns
from deploy.models import tiny

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
BATCH = 64
IGNORED = -100


def main(folder: Path, seed: int, steps: int, pairs: list[tuple[int, int]]) -> None:
    """Writes a Hugging Face folder; 0.6 M parameters, some seconds on one core."""
    torch.set_num_threads(1)
    raw = tiny(folder.with_name(f"{folder.name}-raw"), hidden=128, layers=3, heads=4, kv_heads=2, seed=seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(raw)
    model: Any = AutoModelForCausalLM.from_pretrained(raw, dtype=torch.float32)
    train(model, tokenizer, steps, random.Random(seed), pairs)
    model.save_pretrained(raw)
    raw.rename(folder)


def train(model: Any, tokenizer: Any, steps: int, choice: random.Random, pairs: list[tuple[int, int]]) -> None:
    """Supervised steps on what the policy says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        ids, labels = _batch([_sample(tokenizer, pair) for pair in choice.choices(pairs, k=BATCH)], tokenizer.pad_token_id)
        logits = model(ids).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        optimizer.step()
        optimizer.zero_grad()


def _sample(tokenizer: Any, pair: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Ids, and labels where the policy speaks; it ends each of its turns."""
    ids: list[int] = []
    labels: list[int] = []
    for text, own in turns(pair):
        said = [*tokenizer.encode(text), *([tokenizer.eos_token_id] if own else [])]
        ids += said
        labels += said if own else [IGNORED] * len(said)
    return ids, labels


def _batch(samples: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in samples)
    return torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in samples]), torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in samples])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target.with_name(f"{target.name}-raw"), ignore_errors=True)
    main(target, int(sys.argv[2]), int(sys.argv[3]), [(a, b) for a, b in json.loads(Path(sys.argv[4]).read_text())])
