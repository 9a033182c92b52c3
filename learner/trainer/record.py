"""One JSON object a step in metrics.jsonl, and a few trajectories a step in samples.jsonl, written by rank 0."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner.lines import Lines
from learner.trainer.checkpoint import SaveReport
from learner.trainer.decode import Batch
from learner.trainer.metrics import summary_of_batch, summary_of_result
from learner.trainer.publish import Published
from learner.trainer.table import Entry
from learner.trainer.tally import StepResult
from learner.weights.push import PushMetrics

_SAMPLES_A_STEP = 4
Shaping = Callable[[Sequence[Entry]], Mapping[str, Any]]


class Recorder:
    """Appends whole lines. Example: `Recorder(run_dir, active=rank == 0, clip=(0.2, 0.28)).step(...)`"""

    def __init__(self, run_dir: Path, *, active: bool, clip: tuple[float, float], shaping: Shaping = lambda table: {}) -> None:
        """active: False on ranks that write nothing. clip: (clip_low, clip_high) of the loss. shaping: what lengths did to a batch (shaping.py)."""
        self._active, self._clip, self._shaping = active, clip, shaping
        self._files = {name: Lines(run_dir / name) for name in ("metrics.jsonl", "samples.jsonl")}

    def step(self, batch: Batch, result: StepResult, published: Published, saves: SaveReport, push: PushMetrics, seconds: Mapping[str, float], *, kl_factor: float | None = None) -> None:
        """The line of one finished step. kl_factor: what the next step's KL coefficient is multiplied by; None: it never changes."""
        if not self._active:
            return
        total_s = max(seconds["total"], 1e-9)
        line = {
            "step": published.policy_step,
            "version": published.version,
            "lineage": published.lineage,
            "time_s": time.time(),
            **summary_of_batch(batch),
            **self._shaping(batch.table),
            **summary_of_result(result, clip_low=self._clip[0], clip_high=self._clip[1]),
            **({"kl_factor": kl_factor} if kl_factor is not None else {}),
            "seconds": {**dict.fromkeys(("wait", "train", "snapshot", "save"), 0.0), "push": push.last_seconds, **seconds},
            "trainer_idle_share": seconds.get("wait", 0.0) / total_s,
            "trained_tokens_per_s": sum(entry.num_trained_tokens for entry in batch.table if entry.usable) / total_s,
            "generated_tokens_per_s": None if "startup" in seconds else batch.stats.num_generated_tokens / total_s,  # of a first step they were drawn while things started
            "push": asdict(push),
            "save": asdict(saves),
            "checkpoint_failed": saves.num_failed,
        }
        self._append("metrics.jsonl", [line])
        self._append("samples.jsonl", _samples(batch, published.policy_step))

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines)
        self._files[name].append(text)


def _samples(batch: Batch, step: int) -> list[dict[str, Any]]:
    rewards = {entry.id: entry for entry in batch.table}
    whole = [sample for sample in batch.samples if not sample.strand]
    chosen = whole[:: max(1, len(whole) // _SAMPLES_A_STEP)][:_SAMPLES_A_STEP]
    return [
        {"step": step, "group_id": s.group_id, "sample_index": s.sample_index, "text": s.text, "reward": rewards[s.group_id, s.sample_index].reward, "versions": list(s.versions)}
        for s in chosen
    ]


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
