"""What one rank holds of an FSDP2 model, by Hugging Face name; never gathers a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from learner.weights.plan import Rows, TensorSpec

# Pieces that torch's own wrappers put into names; the served model has none of them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_REPLICATED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The model's tensors in the order of named_parameters, ties once."""

    tensors: tuple[TensorSpec, ...]
    rows: tuple[Rows, ...]  # per tensor: (first_row, num_rows) of each rank, None where all ranks hold all
    parameters: tuple[nn.Parameter, ...]

    def local(self, tensor: int) -> torch.Tensor:
        """This rank's rows of a tensor, on the parameter's device, master dtype. May be empty."""
        parameter = self.parameters[tensor]
        data = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return data.detach()


def served_name(name: str) -> str:
    """The Hugging Face name of a parameter: without the names of torch's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def read_shards(model: nn.Module, *, itemsize: int, group: dist.ProcessGroup | None, world_size: int) -> Shards:
    """Collective: ranks exchange the rows they hold, as one int64 tensor.

    Raises ValueError naming the tensor for every sharding but FSDP2's Shard(0) over all ranks, and replication.
    """
    named = [(served_name(name), parameter) for name, parameter in model.named_parameters()]
    if len({name for name, _ in named}) != len(named):
        raise ValueError(f"two parameters of the model have the same served name: {sorted(name for name, _ in named)}")
    tensors = tuple(TensorSpec(name=name, shape=tuple(p.shape), itemsize=itemsize) for name, p in named)
    held = torch.tensor([_local_rows(name, p, world_size) for name, p in named], dtype=torch.int64)
    counts = gather_int64(held, group, world_size)
    rows = tuple(_ranges([int(counts[rank][t]) for rank in range(world_size)]) for t in range(len(named)))
    return Shards(tensors=tensors, rows=rows, parameters=tuple(p for _, p in named))


def gather_int64(values: torch.Tensor, group: dist.ProcessGroup | None, world_size: int) -> list[torch.Tensor]:
    """Every rank's int64 vector [n], on the CPU; n is the same on all ranks. The group's own device carries it."""
    if world_size == 1:
        return [values]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    parts = [torch.empty_like(values, device=device) for _ in range(world_size)]
    dist.all_gather(parts, values.to(device), group=group)
    return [part.cpu() for part in parts]


def _local_rows(name: str, parameter: nn.Parameter, world_size: int) -> int:
    """Rows held here; -1 for a whole tensor. Raises ValueError naming tensor and placements."""
    if not isinstance(parameter, DTensor):
        return _REPLICATED
    placements, mesh = parameter.placements, parameter.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if all(type(placement) is Replicate for placement in placements):
        return _REPLICATED
    if len(placements) == 1 and type(placements[0]) is Shard and placements[0].dim == 0 and ranks == list(range(world_size)):
        return int(parameter.to_local().shape[0])
    raise ValueError(
        f"tensor {name} is placed as {placements} over ranks {ranks}; weights can be pushed from Shard(0) over all {world_size} ranks (fully_shard on a "
        "one-dimensional mesh) or from replicas: shard the model that way"
    )


def _ranges(counts: list[int]) -> Rows:
    if counts[0] == _REPLICATED:
        return None
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return tuple(zip(starts, counts, strict=True))
