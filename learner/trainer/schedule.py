"""The learning rate, counted in optimizer updates: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from learner.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, *, num_updates: int, total_updates: int | None) -> float:
    """Of the update that follows num_updates finished ones.

    Warm-up: lr * (n + 1) / warmup_updates. Then, with p = (n - warmup) / (total - warmup), at most 1, and m = min_lr_share: linear lr * (1 - (1 - m) p),
    cosine lr * (m + (1 - m) (1 + cos(pi p)) / 2). Args: total_updates, of the whole run, where config.decay_updates does not say; None: unknown.
    Raises ValueError when a decay has no end.
    """
    if num_updates + 1 < config.warmup_updates:
        return config.lr * (num_updates + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.lr
    total = config.decay_updates or total_updates
    if total is None:
        raise ValueError(f"optimizer.schedule={config.schedule} needs an end: set optimizer.decay_updates")
    done = min(1.0, max(0, num_updates - config.warmup_updates) / max(1, total - config.warmup_updates))
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_share + (1.0 - config.min_lr_share) * shape)
