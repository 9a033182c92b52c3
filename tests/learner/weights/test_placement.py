"""Boxes of ranks, by hand and against torch's own cuts (every rank of a world is played in one process by torch's fake backend)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from learner.weights.placement import Split, held
from learner.weights.plan import TensorSpec, make_plan
from learner.weights.shards import box_of, merge


def test_the_example_of_the_page() -> None:
    assert held((8, 4), (2, 2), (1, 1), (Split(dim=0), Split(dim=1))) == ((4, 4), (2, 2))


def test_uneven_parts_are_those_of_chunk_and_the_last_may_be_empty() -> None:
    # 5 rows on 4: chunks of ceil(5 / 4) = 2: 2, 2, 1 and none.
    assert [held((5,), (4,), (rank,), (Split(dim=0),))[0] for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_a_strided_cut_comes_after_the_one_to_its_right() -> None:
    # 8 rows, 2 data ranks over 2 tensor ranks: tensor rank 1 has rows 4..8, of which data rank 1 has 6..8.
    assert held((8,), (2, 2), (1, 1), (Split(dim=0, strided=True, factor=2), Split(dim=0))) == ((6, 2),)
    with pytest.raises(ValueError, match="cut dimension 0 into 2, not into 4"):
        held((8,), (2, 2), (0, 0), (Split(dim=0, strided=True, factor=4), Split(dim=0)))


def test_pipeline_stages_are_merged_and_a_tied_head_of_another_stage_is_one_tensor() -> None:
    first, last = [("model.embed_tokens.weight", (4, 2), ((0, 4), (0, 2)))], [("model.norm.weight", (2,), ((0, 2),)), ("lm_head.weight", (4, 2), ((0, 4), (0, 2)))]
    names, _, boxes = merge([first, last], tied=True)
    assert names == ["model.embed_tokens.weight", "model.norm.weight"] and boxes == ((((0, 4), (0, 2)), None), (None, ((0, 2),)))
    assert merge([first, last], tied=False)[0][-1] == "lm_head.weight"
    with pytest.raises(ValueError, match=r"tensor model.embed_tokens.weight has shape \(4, 2\) on one rank and \(8, 2\) on another"):
        merge([first, [("model.embed_tokens.weight", (8, 2), ((0, 8), (0, 2)))]], tied=False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))


def fsdp(net: nn.Module, size: int) -> None:
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))


def hsdp(net: nn.Module, size: int) -> None:
    fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))


def fsdp_over_tensor_parallel(net: nn.Module, size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])


@pytest.mark.parametrize("wrap", [fsdp, hsdp, fsdp_over_tensor_parallel])
@pytest.mark.parametrize("size", [2, 4, 6])
def test_boxes_of_every_rank_have_the_shapes_that_torch_made_and_tile_every_tensor(wrap: Callable[[nn.Module, int], None], size: int) -> None:
    by_rank: list[list[Any]] = []
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            net = model()
            wrap(net, size)
            # box_of raises where a box has another shape than the local tensor.
            by_rank.append([(name, tuple(p.shape), box_of(name, p)) for name, p in net.named_parameters()])
        finally:
            dist.destroy_process_group()
    names, shapes, boxes = merge(by_rank, tied=False)
    tensors = [TensorSpec(name=name, shape=shape, itemsize=2) for name, shape in zip(names, shapes, strict=True)]
    plan = make_plan(tensors, boxes, bucket_bytes=64)  # raises for a gap or an overlap
    assert sum(run.num_bytes for run in plan.runs) == plan.total_bytes == 2 * (60 + 10 + 70 + 7)
    assert torch.Size(shapes[0]) == (10, 6)
