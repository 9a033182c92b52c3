"""Hugging Face folder to a sharded model: architecture on meta, then each rank's own rows straight from the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from learner.trainer.attention import NAME
from learner.weights.lora import base_parameters, served_name


def build_on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The architecture of folder/config.json with parameters on meta and buffers computed, on the CPU.

    Buffers are not in any file; made on meta they would be garbage after materialisation, so only parameters go there.
    """
    return from_config_on_meta(AutoConfig.from_pretrained(folder), dtype)


def from_config_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """As build_on_meta, of a configuration. Args: config, transformers' own."""
    with on_meta():
        return cast(nn.Module, AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME))


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on meta."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_weights(model: nn.Module, folder: Path, device: torch.device, *, buffers_on: torch.device | None = None) -> None:
    """Materialises a (sharded) meta model on device and fills every parameter and persistent buffer from folder/*.safetensors.

    buffers_on: as of materialize.
    A tied head is one tensor. Raises ValueError naming tensors that the files lack, have beyond the model, have in another
    shape, or hold twice with different values.
    """
    materialize(model, device, buffers_on=buffers_on)
    fill_weights(model, folder)


def fill_weights(model: nn.Module, folder: Path, *, prefix: str = "") -> None:
    """Every parameter and persistent buffer from folder/*.safetensors, where names begin with prefix (adapters are in no file); tensors under other prefixes are left. Raises as load_weights."""
    parameters = dict(base_parameters(model))
    with WeightFiles(folder) as files:
        aliases = _aliases(model, parameters)
        held_names = {served_name(name): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
        persistent = {name: tensor for name, tensor in held_names.items() if name not in parameters and name not in aliases}
        held = {name.removeprefix(prefix) for name in files.names() if name.startswith(prefix)}
        _compare_names(set(parameters) | set(persistent), set(aliases), held, folder)
        for name, tensor in [*parameters.items(), *persistent.items()]:
            _fill(tensor.detach(), files, prefix + name)
        for alias, name in aliases.items():
            if alias in held:
                _require_equal(parameters[name].detach(), files, prefix + alias, prefix + name)


def materialize(model: nn.Module, device: torch.device, *, buffers_on: torch.device | None = None) -> None:
    """Gives the parameters of a (sharded) meta model memory on device, their values still to come. buffers_on: where computed buffers go; None: device."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()  # type: ignore[operator]
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    if buffers_on is not None and buffers_on != device:
        _move_buffers(model, buffers_on)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _aliases(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Other names of parameters that are tied, alias to the name that named_parameters gives."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = {served_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in names}
    return {alias: names[id(parameter)] for alias, parameter in every.items() if alias not in parameters}


def _compare_names(needed: set[str], optional: set[str], held: set[str], folder: Path) -> None:
    missing, extra = sorted(needed - held), sorted(held - needed - optional)
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]  # old files hold this computed buffer
    if missing or extra:
        raise ValueError(f"{folder} does not fit its config.json: {len(missing)} tensors missing ({', '.join(missing[:5])}), {len(extra)} unknown ({', '.join(extra[:5])}); use a folder whose files match its architecture")


class WeightFiles:
    """All tensors of a folder's safetensors files by name, read lazily.

    Example: `with WeightFiles(folder) as files: rows = files.rows("lm_head.weight", 0, 10)`
    """

    def __init__(self, folder: Path) -> None:
        """Raises ValueError when the folder holds no safetensors."""
        index = folder / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [p.name for p in sorted(folder.glob("*.safetensors"))]
        if not names:
            raise ValueError(f"no *.safetensors in {folder}; convert the model to safetensors first")
        self._handles = [safe_open(folder / name, framework="pt") for name in names]
        self._where: dict[str, Any] = {}

    def __enter__(self) -> WeightFiles:
        for handle in self._handles:
            handle.__enter__()
            self._where.update(dict.fromkeys(handle.keys(), handle))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.__exit__(*error)

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The part of a tensor that starts at offset and has this shape."""
        if not shape:
            return cast(Tensor, self._where[name].get_tensor(name))
        slices = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        return cast(Tensor, self._where[name].get_slice(name)[slices])


def own_block(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, and where it starts in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def _fill(tensor: Tensor, files: WeightFiles, name: str) -> None:
    _read_own(tensor, files, name, lambda local, block: local.copy_(block))


def _require_equal(tensor: Tensor, files: WeightFiles, alias: str, name: str) -> None:
    def compare(local: Tensor, block: Tensor) -> None:
        if not torch.equal(local, block.to(local.device, local.dtype)):
            raise ValueError(f"config.json ties {alias} to {name}, but the files hold different values for the two; set tie_word_embeddings=false or remove one of them")

    _read_own(tensor, files, alias, compare)


def _read_own(tensor: Tensor, files: WeightFiles, name: str, use: Callable[[Tensor, Tensor], object]) -> None:
    if files.shape(name) != tuple(tensor.shape):
        raise ValueError(f"tensor {name} has shape {list(files.shape(name))} in the files and {list(tensor.shape)} in the model; use a folder whose files match its config.json")
    local, offset = own_block(tensor)
    if local.numel():
        use(local, files.block(name, offset, tuple(local.shape)))
