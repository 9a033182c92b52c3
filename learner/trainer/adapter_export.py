"""The adapters of a cut: added to the weights they stand beside, or as a folder that peft reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from learner.config import LoraConfig
from learner.weights.lora import served_name
from protos.weights.adapter import merged

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
Load = Callable[[list[str]], dict[str, Tensor]]  # tensors of the cut by the names they have there, float32


def adapted_modules(saved: Mapping[str, torch.Size]) -> list[str]:
    """Modules with an adapter, by Hugging Face name."""
    return [name.removesuffix(_A) for name in saved if name.endswith(_A)]


def saved_names(saved: Mapping[str, torch.Size]) -> dict[str, str]:
    """The model's own weights of a cut: from the Hugging Face name to the one in the cut."""
    return {served_name(name): name for name in saved if ".lora_" not in name}


def load_merged(names: list[str], *, saved: Mapping[str, torch.Size], scaling: float, load: Load) -> dict[str, Tensor]:
    """Weights by Hugging Face name, W + scaling · B A where a module has an adapter: what replicas were sent."""
    own, made = saved_names(saved), {}
    for name in names:
        a, b = (name.removesuffix(".weight") + half for half in (_A, _B))
        wanted = [own[name], *((a, b) if name.endswith(".weight") and a in saved else ())]
        held = load(wanted)
        made[name] = merged(held[own[name]], held[a], held[b], scaling) if len(wanted) > 1 else held[own[name]]
    return made


def export_adapter(*, out_dir: Path, saved: Mapping[str, torch.Size], lora: LoraConfig, model: str, dtype: str, load: Load) -> None:
    """Writes out_dir as `peft.PeftModel.from_pretrained(base, out_dir)` reads it. Args: model, what the adapter is for.

    Raises ValueError when out_dir exists, for a cut without adapters, and without peft.
    """
    modules = adapted_modules(saved)
    if not modules:
        raise ValueError("this cut has no adapters: it was trained without trainer.lora; leave --adapter out")
    if out_dir.exists():
        raise ValueError(f"{out_dir} exists; remove it or name another folder")
    try:
        import peft
    except ImportError as error:
        raise ValueError('exporting an adapter needs the package peft: pip install ".[lora]" in a clone of headrace') from error
    made = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    alpha: Any = lora.alpha
    peft.LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(lora.targets), task_type="CAUSAL_LM", base_model_name_or_path=model, inference_mode=True).save_pretrained(str(made))
    tensors = load([module + part for module in modules for part in (_A, _B)])
    named = {f"base_model.model.{name.replace('.default.', '.')}": tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(named, made / "adapter_model.safetensors", metadata={"format": "pt"})
    made.rename(out_dir)
