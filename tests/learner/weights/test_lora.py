"""Adapters of real peft models: merged or alone, both are the same bytes on the replica, and the trainer's weights stay as they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from learner.weights.lora import targets_of
from learner.weights.snapshot import Lora, SnapshotWriter
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.adapter import MergedStaging, check_adapter, check_fits, merged
from protos.weights.errors import TransferError
from protos.weights.staging import Staging, VerifiedStaging, from_folder
from rollout_server.checkpoint import expected_tensors, stored

TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(folder: Path, **options: Any) -> Any:
    """The tiny model under an adapter that is not zero."""
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def written(model: nn.Module, root: Path, lora: Lora, bucket_bytes: int = 9_000) -> VerifiedStaging:
    return from_folder(SnapshotWriter(model, root=root, incarnation=1, served_dtype="bfloat16", bucket_bytes=bucket_bytes, lora=lora).write(0).folder)


def test_a_merged_push_is_what_peft_merges_and_leaves_the_trainer_s_weights_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:  # faults.md 8
    model = adapted(tiny_model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sent = dict(written(model, tmp_path, "merged").tensors())
    expected = {name: p.detach().bfloat16() for name, p in copy.deepcopy(model).merge_and_unload().named_parameters()}
    assert sent.keys() == expected.keys() and all(torch.equal(sent[name], expected[name]) for name in expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    changed = [name for name, p in base.named_parameters() if not torch.equal(p, sent[name])]
    assert len(changed) == 6 and all(any(target in name for target in TARGETS) for name in changed)


def test_the_adapter_alone_gives_the_same_bytes_and_is_much_smaller(tiny_model: Path, tmp_path: Path) -> None:
    model = adapted(tiny_model)
    whole, alone = written(model, tmp_path / "a", "merged"), written(model, tmp_path / "b", "adapter")
    check_fits(alone.manifest, expected_tensors(tiny_model))
    replica = MergedStaging(alone, lambda name: stored(tiny_model, name), [name for name, _ in expected_tensors(tiny_model)])
    ours, theirs = dict(replica.tensors()), dict(whole.tensors())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {name for name, _ in replica.changed()} == {f"{module}.weight" for module in targets_of(model)}
    assert alone.num_bytes < whole.num_bytes / 5


def test_the_adapter_is_added_once_and_by_hand_it_is_this() -> None:  # faults.md 7, 8
    # W = 0, scaling 0.5, B A = [3, 4]^T [1, 2] -> 0.5 * [[3, 6], [4, 8]]; on x = [1, 1]: [4.5, 6].
    w, a, b = torch.zeros(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    made = merged(w, a, b, 0.5)
    assert (made @ torch.ones(2)).tolist() == [4.5, 6.0] and not w.any()
    assert merged(torch.zeros(2, 2), torch.ones(1, 2), torch.ones(2, 1), 1.0).tolist() == [[1.0, 1.0]] * 2
    # A rank that holds the second row alone makes the second row.
    assert torch.equal(merged(w[1:], a, b[1:], 0.5), made[1:])


def test_an_adapter_that_is_merged_into_the_weights_is_refused(tiny_model: Path, tmp_path: Path) -> None:  # faults.md 8
    model = adapted(tiny_model)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"module model.layers.0.self_attn.q_proj: its adapter is merged into the weight, .*call unmerge_adapter first"):
        written(model, tmp_path, "merged")


def test_what_is_not_plain_lora_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="q_proj is a Linear or uses DoRA or a LoRA bias"):
        written(adapted(tiny_model, use_dora=True), tmp_path, "merged")
    model = adapted(tiny_model)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="trains model.norm.weight beside its adapter"):
        written(model, tmp_path, "adapter")
    with pytest.raises(ValueError, match=r"lora=adapter, but the model has no LoRA modules"):
        written(nn.Linear(2, 2), tmp_path, "adapter")


def test_a_wrong_prefix_half_an_adapter_and_other_shapes_are_refused_before_any_byte(tiny_model: Path, tmp_path: Path) -> None:  # faults.md 7
    manifest, expected = written(adapted(tiny_model), tmp_path, "adapter").manifest, expected_tensors(tiny_model)
    prefixed, halved, other = (manifest_pb2.Manifest.FromString(manifest.SerializeToString()) for _ in range(3))
    for tensor in prefixed.tensors:
        tensor.name = f"base_model.model.{tensor.name}"
    with pytest.raises(TransferError, match="0 of 6 modules match; unknown: base_model.model.model.layers.0.self_attn.q_proj"):
        check_adapter(prefixed, expected)
    del halved.tensors[1]
    with pytest.raises(TransferError, match=r"model.layers.0.self_attn.q_proj has A \(4, 64\) and B None for a weight \(64, 64\)"):
        check_adapter(halved, expected)
    other.tensors[0].shape[1] = 63
    with pytest.raises(TransferError, match=r"q_proj has A \(4, 63\)"):
        check_adapter(other, expected)


def test_an_adapter_over_several_buckets_is_whole_only_after_the_last_and_keeps_nothing_of_the_buffer(tiny_model: Path, tmp_path: Path) -> None:  # faults.md 9
    model = adapted(tiny_model)
    snapshot = SnapshotWriter(model, root=tmp_path, incarnation=1, served_dtype="bfloat16", bucket_bytes=1536, lora="adapter").write(0)  # 1.5 halves of 4 x 64 float32
    manifest = manifest_pb2.Manifest.FromString((snapshot.folder / "manifest.bin").read_bytes())
    data = torch.frombuffer(bytearray((snapshot.folder / "rank-0.bin").read_bytes()), dtype=torch.uint8)
    staging, buffer = Staging(manifest), torch.empty(1536, dtype=torch.uint8)
    for index, bucket in enumerate(manifest.buckets):
        if index == len(manifest.buckets) - 1:
            with pytest.raises(TransferError, match="did not come"):
                staging.verify()
        view = buffer[: bucket.num_bytes]
        view.copy_(data[bucket.file_offset : bucket.file_offset + bucket.num_bytes])
        staging.write_bucket(index, view)
        buffer.fill_(7)
    found = dict(staging.verify().tensors())
    first = targets_of(model)["model.layers.0.self_attn.q_proj"]
    assert torch.equal(found["model.layers.0.self_attn.q_proj.lora_A.weight"], first.a) and torch.equal(found["model.layers.0.self_attn.q_proj.lora_B.weight"], first.b)
