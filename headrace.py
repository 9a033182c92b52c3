"""Headrace: reinforcement learning for language models, with rollout, reward and learner as separate services.

    import headrace
    headrace.launch("run.yaml")
    headrace.GRPOTrainer(model="models/smollm2", prompts="train.jsonl", reward="last_number", steps=50).train()
"""

from __future__ import annotations

from deploy import __version__
from deploy.trainer import GRPOTrainer, Result, launch

__all__ = ["GRPOTrainer", "Result", "__version__", "launch"]
