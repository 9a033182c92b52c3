"""Steps and evaluations as they are appended to metrics.jsonl, and a line of words for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from learner.gateway.evaluation_result import words as evaluation_words
from protos.appended import whole_lines

Metrics = dict[str, Any]


async def follow(file: Path, *, pause_s: float = 0.5, from_start: bool = False) -> AsyncIterator[Metrics]:
    """Objects of whole lines added from now on (or from the start); for ever. The file need not exist yet."""
    offset = 0 if from_start or not file.exists() else file.stat().st_size
    while True:
        for line, end in whole_lines(file, offset):
            offset = end
            yield json.loads(line)
        await asyncio.sleep(pause_s)


def read_all(file: Path) -> list[Metrics]:
    """Every whole line of a file; none where there is no file."""
    return [json.loads(line) for line, _ in whole_lines(file, 0)]


def surviving(lines: list[Metrics]) -> list[Metrics]:
    """The line of each step in the surviving lineage, in order: a step that is made again after a rollback ends the lineage in which it and all later ones had been made.

    Example: of steps 1 2 3 4 2 3 the first line and the last two survive.
    """
    kept: list[Metrics] = []
    for line in lines:
        if "evaluation" not in line:
            while kept and int(kept[-1]["step"]) >= int(line["step"]):
                kept.pop()
            kept.append(line)
    return kept


def evaluations(lines: list[Metrics]) -> list[Metrics]:
    """The line of each evaluated step in the surviving lineage, in order; the last one where it was evaluated again.

    A step that is made again takes with it what had been evaluated of it and of later ones.
    """
    last: dict[int, Metrics] = {}
    for line in lines:
        step = int(line["step"])
        if "evaluation" in line:
            last[step] = line
        else:
            last = {evaluated: each for evaluated, each in last.items() if evaluated < step}
    return [last[step] for step in sorted(last)]


def words(metrics: Metrics, num_steps: int) -> str:
    """One step on one line: reward, staleness by share of tokens, speed, idleness of both sides; or one evaluation."""
    if "evaluation" in metrics:
        return f"evaluation of step {metrics['step']} (version {metrics['version']}): {evaluation_words(metrics['evaluation'])}"
    staleness = {int(age): int(tokens) for age, tokens in metrics.get("staleness", {}).items()}
    total = sum(staleness.values()) or 1
    ages = " ".join(f"{age}:{100 * tokens / total:.0f}%" for age, tokens in sorted(staleness.items()))
    dropped, drawn = sum(metrics.get("dropped", {}).values()), metrics["generated_tokens_per_s"]
    return (
        f"step {metrics['step']:>3}/{num_steps}  version {metrics['version']}  reward {metrics['reward_mean']:.3f}  staleness {ages or '-'}"
        f"  {'-' if drawn is None else f'{drawn:.0f}'} tok/s drawn, {metrics['trained_tokens_per_s']:.0f} trained"
        f"  idle: learner {metrics['trainer_idle_share']:.0%}, replicas {metrics['replica_idle_share']:.0%}"
        f"  groups: {metrics['leased_groups']} leased, {dropped} dropped  {metrics['seconds']['total']:.1f} s"
    )
