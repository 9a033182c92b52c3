"""`python -m deploy.demo.warm_up FOLDER SEED STEPS DIGITS.json`: a tiny Llama that has seen a little sorting.

Supervised steps are few on purpose: the model knows the form of an answer and is right in about four of ten, so that
reinforcement has something to reward and something to improve. A process of its own, since it needs torch.
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

from deploy.demo.sorting import answer, prompt
from deploy.models import tiny

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
BATCH = 64


def main(folder: Path, seed: int, steps: int, digits: list[str]) -> None:
    """Writes a Hugging Face folder; 0.6 M parameters, about a second on one core."""
    torch.set_num_threads(1)
    raw = tiny(folder.with_name(f"{folder.name}-raw"), hidden=128, layers=3, heads=4, kv_heads=2, seed=seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(raw)
    model: Any = AutoModelForCausalLM.from_pretrained(raw, dtype=torch.float32)
    train(model, tokenizer, steps, random.Random(seed), digits)
    model.save_pretrained(raw)
    raw.rename(folder)


def train(model: Any, tokenizer: Any, steps: int, choice: random.Random, digits: list[str]) -> None:
    """Supervised steps on the answers alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        batch = choice.choices(digits, k=BATCH)
        ids = torch.tensor([[*tokenizer.encode(prompt(each) + answer(each)), tokenizer.eos_token_id] for each in batch])
        answered = ids.shape[1] - len(prompt(batch[0]))  # one token a character, and the end
        logits = model(ids).logits[:, -answered - 1 : -1]
        cross_entropy(logits.flatten(0, 1), ids[:, -answered:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target.with_name(f"{target.name}-raw"), ignore_errors=True)
    main(target, int(sys.argv[2]), int(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
