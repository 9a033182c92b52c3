"""Snapshots of plain and of sharded models on one rank; several ranks are in test_push.py."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, distribute_tensor

from learner.shared_memory import snapshot_root
from learner.weights.shards import served_name
from learner.weights.snapshot import SnapshotWriter
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.staging import from_folder
from protos.weights.windows import Windows


class Tied(nn.Module):
    """Vocabulary of 4, hidden 2; the head is the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        embedding = nn.Embedding(4, 2)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "norm": nn.LayerNorm(2, bias=False)})
        self.lm_head = nn.Linear(2, 4, bias=False)
        if tied:
            self.lm_head.weight = embedding.weight


def writer(model: nn.Module, root: Path, dtype: str = "float32", bucket_bytes: int = 1024) -> SnapshotWriter:
    return SnapshotWriter(model, root=root, incarnation=17, served_dtype=dtype, bucket_bytes=bucket_bytes)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(from_folder(folder).tensors())


def test_a_tied_head_is_one_tensor_and_an_untied_one_is_two(tmp_path: Path) -> None:  # faults.md 1
    tied = read(writer(Tied(), tmp_path / "a").write(0).folder)
    untied = read(writer(Tied(tied=False), tmp_path / "b").write(0).folder)
    assert list(tied) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert list(untied) == [*tied, "lm_head.weight"]


def test_masters_are_rounded_to_nearest_even_and_the_dtype_is_announced(tmp_path: Path) -> None:  # faults.md 3
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]))
    snapshot = writer(model, tmp_path, "bfloat16").write(3)
    assert read(snapshot.folder)["w"].tolist() == [1.0, 1.015625]
    assert manifest_pb2.Manifest.FromString((snapshot.folder / "manifest.bin").read_bytes()).tensors[0].dtype == "bfloat16"
    assert (snapshot.num_bytes, snapshot.total_bytes, snapshot.policy_step) == (4, 4, 3)


def test_what_comes_through_windows_is_what_a_plain_copy_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As from a GPU, with windows of 10 bytes over tensors of 16 and 4 (bfloat16).
    torch.manual_seed(5)
    model = Tied()
    plain = writer(model, tmp_path / "a", "bfloat16").write(0).folder
    monkeypatch.setattr(SnapshotWriter, "_windows_of", lambda self, device: Windows(device, window_bytes=10))
    windowed = writer(model, tmp_path / "b", "bfloat16").write(0).folder
    assert (windowed / "rank-0.bin").read_bytes() == (plain / "rank-0.bin").read_bytes()
    assert all(torch.equal(a, b) for a, b in zip(read(plain).values(), read(windowed).values(), strict=True))


def test_what_was_written_is_the_policy_of_the_call_whatever_happens_to_the_model_after(tmp_path: Path) -> None:  # faults.md 15
    model = Tied()
    writing = writer(model, tmp_path, bucket_bytes=12)
    for step in range(20):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        folder = writing.write(step).folder
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in read(folder).items())


def test_only_the_newest_two_are_kept_and_those_of_dead_incarnations_go_first(tmp_path: Path) -> None:
    (tmp_path / "9-50").mkdir()
    writing = writer(Tied(), tmp_path)
    for step in range(3):
        writing.write(step)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["17-1", "17-2"]
    writing.close()
    assert not tmp_path.exists()


def test_full_shared_memory_is_an_error_that_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="snapshot of policy step 0: No space left on device; 40 bytes a version, 3 of them at a time"):
        writer(Tied(), tmp_path).write(0)


def test_wrapper_names_never_reach_the_wire() -> None:  # faults.md 6
    assert served_name("model._orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight") == "model.layers.0.mlp.weight"


def test_an_unknown_served_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="served dtype 'int8' is none of float32, bfloat16, float16"):
        writer(Tied(), tmp_path, "int8")


def test_the_run_folder_is_on_shared_memory() -> None:
    assert snapshot_root("r1") == Path("/dev/shm/headrace-r1")


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_sharding_by_columns_is_sent_as_it_lies(one_rank: DeviceMesh, tmp_path: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(2, 4), one_rank, [Shard(1)]))
    assert read(writer(model, tmp_path, bucket_bytes=12).write(0).folder)["w"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_partial_sum_is_refused_by_name(one_rank: DeviceMesh, tmp_path: Path) -> None:
    model = nn.Module()
    model.w = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), one_rank, [Partial()]))
    with pytest.raises(ValueError, match=r"tensor w is placed as \(Partial\(sum\),\) over a mesh of \(1,\): .*neither a shard nor a replica"):
        writer(model, tmp_path)


def test_a_pattern_of_names_may_be_served_in_another_dtype(tmp_path: Path) -> None:
    model = Tied()
    made = SnapshotWriter(model, root=tmp_path, incarnation=17, served_dtype="bfloat16", dtypes={"*.norm.*": "float32"}, bucket_bytes=1024).write(0)
    assert {name: tensor.dtype for name, tensor in read(made.folder).items()} == {"model.embed_tokens.weight": torch.bfloat16, "model.norm.weight": torch.float32}


def test_without_verification_coverage_alone_counts(tmp_path: Path) -> None:
    model = Tied()
    made = SnapshotWriter(model, root=tmp_path, incarnation=17, served_dtype="float32", bucket_bytes=1024, verify="off").write(0)
    (made.folder / "rank-0.bin").write_bytes(bytes(made.num_bytes))  # a digest would catch it
    assert read(made.folder)["model.norm.weight"].tolist() == [0, 0]


def test_one_sharded_rank_writes_its_rows_without_gathering(one_rank: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(_: DTensor) -> torch.Tensor:
        raise AssertionError("full_tensor was called")

    monkeypatch.setattr(DTensor, "full_tensor", gathered)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(4, 2), one_rank, [Shard(0)]))
    assert read(writer(model, tmp_path, bucket_bytes=12).write(0).folder)["w"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
