"""Small reward models made by tests: random weights, one token a byte."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.models import tiny


def causal(folder: Path) -> Path:
    """A language model that answers at random."""
    return tiny(folder / "causal", heads=4, kv_heads=2, hidden=64)


def classifier(folder: Path, *, num_labels: int = 1) -> Path:
    """The same with a classification head."""
    import torch
    import transformers

    made = folder / f"classifier-{num_labels}"
    base = causal(folder)
    torch.manual_seed(7)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.config.id2label = {index: f"LABEL_{index}" for index in range(num_labels)}
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(made)
    assert json.loads((made / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    return made
