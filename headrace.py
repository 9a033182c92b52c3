"""Headrace: reinforcement learning for language models, with rollout, reward and learner as separate services.

    import headrace
    headrace.launch("run.yaml")
    headrace.GRPOTrainer(model="models/smollm2", prompts="train.jsonl", reward="last_number", steps=50).train()
    headrace.PPOTrainer(model_name="models/smollm2", num_gpus=0, batch_size=64, sequence_length=256).train()
"""

from __future__ import annotations

from deploy import __version__
from deploy.trainer import GRPOTrainer, PPOTrainer, Result, launch

__all__ = ["GRPOTrainer", "PPOTrainer", "Result", "__version__", "launch"]
