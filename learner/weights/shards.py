"""What the ranks hold of a model (FSDP2, HSDP, tensor and pipeline parallelism), by Hugging Face name; never gathers a tensor."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from socket import gethostname
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from learner.weights.placement import Box, Split, held, whole
from learner.weights.plan import TensorSpec
from protos.weights.staging import DTYPES

# Pieces that torch's own wrappers put into names; the served model has none of them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The model's tensors in the order of named_parameters, ties once; over pipeline stages in the order of the ranks."""

    tensors: tuple[TensorSpec, ...]
    held: tuple[tuple[Box | None, ...], ...]  # for each tensor: the box of each rank; None: it has nothing of it
    hosts: tuple[int, ...]  # for each rank: a number of its node
    parameters: Mapping[int, nn.Parameter]  # by index of the tensor: what this rank holds

    def local(self, tensor: int) -> torch.Tensor:
        """This rank's part of a tensor, on the parameter's device, master dtype. May be empty."""
        return _local(self.parameters[tensor])


def served_name(name: str) -> str:
    """The Hugging Face name of a parameter: without the names of torch's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def read_shards(
    model: nn.Module, *, served_dtype: str, dtypes: Mapping[str, str] | None = None, named: Iterable[tuple[str, nn.Parameter]] | None = None,
    group: dist.ProcessGroup | None, world_size: int,
) -> Shards:  # fmt: skip
    """Collective: ranks tell one another names, shapes and boxes.

    named: what is sent, by Hugging Face name (None: the model's parameters). dtypes: exceptions, from a pattern of names ("*.router.weight") to a served dtype; the first that matches counts.
    Raises ValueError naming the tensor for placements that cannot be sent, and for ranks that disagree.
    """
    named = [(served_name(name), parameter) for name, parameter in (model.named_parameters() if named is None else named)]
    if len({name for name, _ in named}) != len(named):
        raise ValueError(f"two parameters of the model have the same served name: {sorted(name for name, _ in named)}")
    mine = [(name, tuple(parameter.shape), box_of(name, parameter)) for name, parameter in named]
    answers = gather_values([mine, zlib.crc32(gethostname().encode())], group, world_size)
    names, shapes, boxes = merge([_entries(answer[0]) for answer in answers], tied=bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False)))
    own = dict(named)
    return Shards(
        tensors=tuple(_spec(name, shape, dtype_of(name, served_dtype, dtypes or {})) for name, shape in zip(names, shapes, strict=True)),
        held=boxes,
        hosts=tuple(answer[1] for answer in answers),
        parameters={index: own[name] for index, name in enumerate(names) if name in own},
    )


def dtype_of(name: str, served_dtype: str, dtypes: Mapping[str, str]) -> str:
    """The served dtype of one tensor."""
    return next((dtype for pattern, dtype in dtypes.items() if fnmatchcase(name, pattern)), served_dtype)


Entry = tuple[str, tuple[int, ...], Box]  # name, shape of the whole tensor, the rank's box


def merge(ranks: Sequence[Sequence[Entry]], *, tied: bool) -> tuple[list[str], list[tuple[int, ...]], tuple[tuple[Box | None, ...], ...]]:
    """Names, shapes and boxes of all ranks' entries; a tied head that another stage keeps as its own parameter is left out.

    Raises ValueError naming a tensor that has two shapes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for entries in ranks:
        for name, shape, _ in entries:
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"tensor {name} has shape {shapes[name]} on one rank and {shape} on another")
    if tied and _HEAD in shapes and any(name.endswith(_EMBEDDING) for name in shapes):
        del shapes[_HEAD]  # the engine owns one parameter
    by_rank = [{name: box for name, _, box in entries} for entries in ranks]
    return list(shapes), list(shapes.values()), tuple(tuple(boxes.get(name) for boxes in by_rank) for name in shapes)


def box_of(name: str, parameter: nn.Parameter) -> Box:
    """What this rank holds. Raises ValueError naming tensor and placements."""
    if not isinstance(parameter, DTensor):
        return whole(tuple(parameter.shape))
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
    try:
        box = held(tuple(parameter.shape), tuple(mesh.shape), coordinate, [_split(placement) for placement in placements])
    except ValueError as error:
        raise ValueError(f"tensor {name} is placed as {placements} over a mesh of {tuple(mesh.shape)}: {error}") from None
    local = tuple(parameter.to_local().shape)
    if tuple(count for _, count in box) != local:
        raise ValueError(f"tensor {name} is placed as {placements}, by which this rank holds {box}, but it holds a part of shape {local}")
    return box


def _split(placement: Any) -> Split | None:
    if isinstance(placement, Replicate):
        return None
    if type(placement).__name__ == "_StridedShard":
        return Split(dim=placement.dim, strided=True, factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Split(dim=placement.dim)
    raise ValueError(f"{placement} is neither a shard nor a replica (a partial sum has no bytes of its own); weights are sent from Shard and Replicate")


def _local(parameter: nn.Parameter) -> torch.Tensor:
    data = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return data.detach()


def _spec(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, itemsize=DTYPES[dtype].itemsize)


def _entries(value: Any) -> list[Entry]:
    return [(name, tuple(shape), tuple((start, count) for start, count in box)) for name, shape, box in value]


def gather_values(value: Any, group: dist.ProcessGroup | None, world_size: int) -> list[Any]:
    """Every rank's msgpack-able value, in the order of the ranks."""
    data = np.frombuffer(msgpack.packb(value), dtype=np.uint8)
    sizes = [int(size) for size in gather_int64(torch.tensor([len(data)]), group, world_size)]
    padded = np.zeros(-(-max(sizes) // 8) * 8, dtype=np.uint8)
    padded[: len(data)] = data
    parts = gather_int64(torch.from_numpy(padded.view(np.int64)), group, world_size)
    return [msgpack.unpackb(part.numpy().tobytes()[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather_int64(values: torch.Tensor, group: dist.ProcessGroup | None, world_size: int) -> list[torch.Tensor]:
    """Every rank's int64 vector [n], on the CPU; n is the same on all ranks. The group's own device carries it."""
    if world_size == 1:
        return [values]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    parts = [torch.empty_like(values, device=device) for _ in range(world_size)]
    dist.all_gather(parts, values.to(device), group=group)
    return [part.cpu() for part in parts]
