"""The demo's task: sums and differences of two numbers from reasoning_gym, with held-out questions that training never sees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from deploy.services import write_atomically
from learner.gateway.prompts import Prompt
from learner.gateway.rendering import Renderer

GENERATOR = "chain_sum"
PARAMETERS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
SYSTEM = ""  # a system message without text, which keeps the model's own default one out
SUFFIX = " Answer with the number only."
HELD_OUT_ONE_IN = 4
_SEEDS_APART = 10_000_000  # the generator seeds task i with seed + i: streams must lie far apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One question with its answer.

    Example: `Task(id="chain_sum-10000007", prompt="State the final answer to ...: 6 + 5 =", answer="11", expression="6 + 5")`
    """

    id: str  # generator and its seed for this task: makes it again
    prompt: str
    answer: str
    expression: str


def held_out_seed(seed: int) -> int:
    """First generator seed of the held-out tasks."""
    return (2 * seed + 1) * _SEEDS_APART


def training_seed(seed: int) -> int:
    """First generator seed of the training tasks."""
    return (2 * seed + 2) * _SEEDS_APART


def is_held_out(prompt: str) -> bool:
    """Whether a question belongs to the quarter that training never sees, whatever the seeds: decided by its digest alone."""
    return xxhash.xxh3_64_intdigest(prompt.encode()) % HELD_OUT_ONE_IN == 0


def held_out(num: int, *, seed: int) -> list[Task]:
    """`num` different held-out questions, the first that the generator makes from held_out_seed."""
    return _take(num, _distinct(task for task in _stream(held_out_seed(seed)) if is_held_out(task.prompt)))


def training(num: int, *, seed: int) -> list[Task]:
    """`num` tasks from training_seed on, none of them held out; questions may repeat, since only 200 have one digit."""
    return _take(num, (task for task in _stream(training_seed(seed)) if not is_held_out(task.prompt)))


def write_jsonl(file: Path, tasks: Iterable[Task]) -> None:
    """One task a line, with the generator's name in `metadata`."""
    lines = (json.dumps({**asdict(task), "metadata": {"source_dataset": GENERATOR}}) for task in tasks)
    write_atomically(file, "".join(f"{line}\n" for line in lines))


def read_jsonl(file: Path) -> list[Task]:
    """What write_jsonl wrote."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [Task(**{key: record[key] for key in Task.__slots__}) for record in records]


def messages(prompt: str) -> list[dict[str, str]]:
    """The chat messages that the learner makes of a prompt with this system message and suffix."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt + SUFFIX}]


def _stream(seed: int) -> Iterator[Task]:
    """Tasks without end."""
    import reasoning_gym

    dataset: Any = reasoning_gym.create_dataset(GENERATOR, size=_SEEDS_APART, seed=seed, **PARAMETERS)
    for index in range(_SEEDS_APART):
        entry = dataset[index]
        expression = entry["metadata"]["expression"]
        yield Task(id=f"{GENERATOR}-{seed + index}", prompt=entry["question"], answer=entry["answer"], expression=expression)


def _distinct(tasks: Iterable[Task]) -> Iterator[Task]:
    seen: set[str] = set()
    for task in tasks:
        if task.prompt not in seen:
            seen.add(task.prompt)
            yield task


def _take(num: int, tasks: Iterator[Task]) -> list[Task]:
    return [next(tasks) for _ in range(num)]


def describe(example: Task, model: Path, *, seed: int, max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """All that is needed to repeat the evaluation from outside, with plain transformers on the saved folder."""
    text, token_ids = rendered(example.prompt, model)
    return {
        "generator": {
            "package": "reasoning_gym",
            "name": GENERATOR,
            "parameters": PARAMETERS,
            "call": f"reasoning_gym.create_dataset({GENERATOR!r}, size=N, seed=SEED, **parameters)",
            "seed_note": "the generator makes item i from seed + i alone",
        },
        "split": {
            "rule": f"xxhash.xxh3_64_intdigest(question.encode()) % {HELD_OUT_ONE_IN} == 0 is held out: training sees no such question",
            "held_out": {"file": "held_out.jsonl", "seed": held_out_seed(seed), "note": "the first different held-out questions of the stream"},
            "training": {"file": "train.jsonl", "seed": training_seed(seed)},
        },
        "prompt": {
            "template": "the model's chat template with add_generation_prompt=True",
            "system": SYSTEM,
            "user": "{question}" + SUFFIX,
            "system_message": "present, with empty text",
            "example": {"question": example.prompt, "answer": example.answer, "text": text, "token_ids": list(token_ids)},
        },
        "sampling": {"evaluation": "greedy (temperature 0)", "max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_token_ids)},
        "scorer": {
            "use": "last_number",
            "code": "reward_server/scorers/last_number.py",
            "words": "1 when the last number in the decoded completion (special tokens left out) equals the answer, else 0; a minus between two numbers is an operator, not a sign",
        },
        "model": "run_dir/model, a Hugging Face folder",
    }


def rendered(prompt: str, model: Path) -> tuple[str, tuple[int, ...]]:
    """Text and token ids that the learner makes of a prompt, by its own renderer."""
    full = prompt + SUFFIX
    asked = Prompt(prompt_id="example", text=full, messages=({"role": "user", "content": full},), fields={})
    renderer = Renderer(model, template="chat", system=SYSTEM)
    return renderer.text(asked), renderer.ids([asked])[0]
