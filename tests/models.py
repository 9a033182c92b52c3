"""Tiny models for tests that want another shape than the `tiny_model` fixture's."""

from __future__ import annotations

from pathlib import Path

from deploy.models import tiny


def tiny_model_in(folder: Path, *, architecture: str = "llama", tied: bool = True, hidden: int = 64, layers: int = 2, seed: int = 0) -> Path:
    """A model of `hidden // 32` heads of 32 sharing one key-value head, under `folder`; about 0.1 M parameters."""
    name = f"{architecture}-{hidden}x{layers}-{'tied' if tied else 'untied'}-{seed}"
    heads = hidden // 32
    return tiny(folder / name, architecture=architecture, hidden=hidden, layers=layers, heads=heads, tied=tied, seed=seed)
