"""A cut as a Hugging Face folder, on the CPU: weights from the ranks' files, the rest from the model that training began with."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from learner.config import LoraConfig
from learner.trainer.adapter_export import adapted_modules, load_merged, saved_names
from learner.trainer.export import copy_companions, write_config
from learner.trainer.loading import WeightFiles, build_on_meta

SHARD_BYTES = 4 << 30
_PREFIX = "model."  # of the weights among a cut's entries
Tensors = dict[str, Tensor]


def export_cut(*, cut: Path, model_dir: Path, out_dir: Path, dtype: str, lora: LoraConfig | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes out_dir, which must not exist: weights in `dtype`, a tied head once, persistent buffers as in model_dir, and its tokenizer files.

    lora: what the run was configured with; its adapters are added to the weights. At most shard_bytes of weights are in memory at a time.
    Raises ValueError when cut and model, or cut and lora, do not belong together.
    """
    if out_dir.exists():
        raise ValueError(f"{out_dir} exists; remove it or name another folder")
    saved = saved_shapes(cut)
    modules, shapes = adapted_modules(saved), {name: saved[own] for name, own in saved_names(saved).items()}
    if modules and lora is None:
        raise ValueError(f"{cut} holds adapters of {len(modules)} modules, and nothing says their trainer.lora.rank and alpha; export a cut that lies in its run folder")
    scaling = lora.alpha / lora.rank if lora is not None else 1.0
    buffers = _check_names(model_dir, set(shapes))
    made = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    copy_companions(model_dir, made)
    write_config(model_dir, made, dtype)
    wanted: torch.dtype = getattr(torch, dtype)
    parts = list(_parts(shapes, wanted.itemsize, shard_bytes))

    def load(names: list[str]) -> Tensors:
        held = load_merged(names, saved=saved, scaling=scaling, load=lambda own: load_saved(cut, {name: saved[name] for name in own}))
        return {name: tensor.to(wanted) for name, tensor in held.items()}

    _write_parts(made, parts, load, _buffers(model_dir, buffers))
    made.rename(out_dir)


def saved_shapes(cut: Path) -> dict[str, torch.Size]:
    """Name and shape of every weight of a cut. Raises ValueError where none is."""
    try:
        entries = dcp.FileSystemReader(cut).read_metadata().state_dict_metadata
    except (OSError, ValueError) as error:
        raise ValueError(f"{cut} holds no readable checkpoint ({error}); `headrace checkpoint verify` says which file is wrong") from error
    shapes = {name.removeprefix(_PREFIX): entry.size for name, entry in entries.items() if name.startswith(_PREFIX) and hasattr(entry, "size")}
    if not shapes:
        raise ValueError(f"{cut} holds no weights")
    return shapes


def _check_names(model_dir: Path, saved: set[str]) -> list[str]:
    """Persistent buffers of the architecture, which no cut holds. Raises ValueError when its parameters are not the cut's."""
    model = build_on_meta(model_dir, torch.float32)
    needed = {name for name, _ in model.named_parameters()}
    if needed != saved:
        missing, extra = sorted(needed - saved), sorted(saved - needed)
        raise ValueError(f"{model_dir} is not the model of this cut: {len(missing)} of its parameters are not saved ({', '.join(missing[:3])}), {len(extra)} saved ones are unknown to it ({', '.join(extra[:3])}); name the model that training began with")
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(set(model.state_dict()) - every)


def _parts(shapes: dict[str, torch.Size], itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    """Names by file, in order, each file at most shard_bytes unless one tensor is larger."""
    part: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = shape.numel() * itemsize
        if part and size + num_bytes > shard_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += num_bytes
    yield part


def load_saved(cut: Path, shapes: dict[str, torch.Size]) -> Tensors:
    """Weights of a cut, by the names they have there, float32."""
    state = {"model": {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}}
    dcp.load(state, checkpoint_id=cut, no_dist=True)
    return state["model"]


def _buffers(model_dir: Path, names: list[str]) -> Tensors:
    if not names:
        return {}
    with WeightFiles(model_dir) as files:
        return {name: files.block(name, (0,) * len(files.shape(name)), files.shape(name)) for name in names if name in files.names()}


def _readable(folder: Path) -> int:
    """The mode that a plain file gets here, by the umask."""
    probe = folder / ".mode"
    probe.touch()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()


def _write_parts(folder: Path, parts: list[list[str]], load: Callable[[list[str]], Tensors], buffers: Tensors) -> None:
    """model.safetensors, or numbered files with an index that names exactly what they hold."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(parts, start=1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = load(names) | (buffers if number == len(parts) else {})
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(_readable(folder))  # safetensors writes for its owner alone
        with (folder / file).open("rb") as written:
            os.fsync(written.fileno())
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
