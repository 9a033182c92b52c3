"""`python -m deploy.demo.tool_warm_up FOLDER SEED PAIRS.json`: a tiny Llama that has seen a calculator being asked a few times.

Supervised steps end as soon as one sample in seven comes out right, so that reinforcement has something to reward and much to improve. A
process of its own, since it needs torch.
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

from deploy.demo.sums import LONGEST, answer, prompt, turns
from deploy.models import tiny

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
BATCH = 64
IGNORED = -100
RIGHT_SHARE = 1 / 7  # of greedy samples, at which supervision ends
MOST_STEPS, LOOK_STEPS = 400, 5


def main(folder: Path, seed: int, pairs: list[tuple[int, int]]) -> None:
    """Writes a Hugging Face folder; 0.6 M parameters, some seconds on one core."""
    torch.set_num_threads(1)
    raw = tiny(folder.with_name(f"{folder.name}-raw"), hidden=128, layers=3, heads=4, kv_heads=2, seed=seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(raw)
    model: Any = AutoModelForCausalLM.from_pretrained(raw, dtype=torch.float32)
    train(model, tokenizer, random.Random(seed), pairs)
    model.save_pretrained(raw)
    raw.rename(folder)


def train(model: Any, tokenizer: Any, choice: random.Random, pairs: list[tuple[int, int]]) -> int:
    """Supervised steps on what the policy says, until RIGHT_SHARE of some training sums come out right; how many."""
    asked = choice.sample(pairs, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(MOST_STEPS):
        if step % LOOK_STEPS == 0 and right_share(model, tokenizer, asked) >= RIGHT_SHARE:
            return step
        ids, labels = _batch([_sample(tokenizer, pair) for pair in choice.choices(pairs, k=BATCH)], tokenizer.pad_token_id)
        logits = model(ids).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return MOST_STEPS


@torch.no_grad()
def right_share(model: Any, tokenizer: Any, pairs: list[tuple[int, int]]) -> float:
    """Of these sums, how many a greedy policy asks the calculator for as written, and answers as it says."""
    num_right = 0
    by_length: dict[int, list[tuple[list[int], tuple[int, int]]]] = {}
    for said, pair in zip(_greedy(model, tokenizer, [tokenizer.encode(prompt(pair)) for pair in pairs]), pairs, strict=True):
        _, (question, _), (result, _), _ = turns(pair)
        ids = [*tokenizer.encode(prompt(pair)), *said, *tokenizer.encode(result)]
        if tokenizer.decode(said, skip_special_tokens=True) == question and said[-1] == tokenizer.eos_token_id:
            by_length.setdefault(len(ids), []).append((ids, pair))
    for asked in by_length.values():
        answers = _greedy(model, tokenizer, [ids for ids, _ in asked])
        num_right += sum(tokenizer.decode(said, skip_special_tokens=True) == answer(pair) for said, (_, pair) in zip(answers, asked, strict=True))
    return num_right / len(pairs)


def _greedy(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Up to LONGEST tokens and an end after each of some prompts of one length."""
    ids = torch.tensor(prompts)
    for _ in range(LONGEST + 1):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1)[:, None]], 1)
    drawn: list[list[int]] = ids[:, len(prompts[0]) :].tolist()
    return [row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in drawn]


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
    main(target, int(sys.argv[2]), [(a, b) for a, b in json.loads(Path(sys.argv[3]).read_text())])
