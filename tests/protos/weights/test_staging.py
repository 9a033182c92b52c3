"""What is caught before a version may be committed, each time naming the tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.side import Side
from protos.weights.staging import Staging, check_names, digest, from_folder, no_room

# Two tensors of one owner in two buckets of 12 bytes and a rest: a = bytes 0..15, b = bytes 16..31 of the file.
CONTENT = np.arange(32, dtype=np.uint8)
BUCKETS = [(0, 12), (12, 12), (24, 8)]
SLICES = [  # tensor, tensor_offset, num_bytes, bucket, bucket_offset
    (0, 0, 12, 0, 0),
    (0, 12, 4, 1, 0),
    (1, 0, 8, 1, 4),
    (1, 8, 8, 2, 0),
]


def manifest(version: int = 7) -> manifest_pb2.Manifest:
    made = manifest_pb2.Manifest(version=version)
    made.tensors.add(name="model.a.weight", shape=[2, 2], dtype="float32")
    made.tensors.add(name="model.b.weight", shape=[8], dtype="bfloat16")
    starts = [0, 16]
    for tensor, offset, count, bucket, at in SLICES:
        first = starts[tensor] + offset
        piece = CONTENT[first : first + count]
        made.slices.add(tensor=tensor, tensor_offset=offset, num_bytes=count, bucket=bucket, bucket_offset=at, digest=digest(piece))
    for start, size in BUCKETS:
        made.buckets.add(owner=0, num_bytes=size, file_offset=start)
    return made


def bucket(index: int) -> torch.Tensor:
    start, size = BUCKETS[index]
    return torch.from_numpy(CONTENT[start : start + size].copy())


def test_whole_buckets_in_any_order_give_the_tensors_by_name_shape_and_dtype() -> None:
    staging = Staging(manifest())
    for index in (2, 0, 1):
        staging.write_bucket(index, bucket(index))
    verified = staging.verify()
    (name_a, a), (name_b, b) = verified.tensors()
    assert (verified.version, name_a, name_b) == (7, "model.a.weight", "model.b.weight")
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((2, 2), torch.float32, (8,), torch.bfloat16)
    assert a.reshape(-1).view(torch.uint8).tolist() == list(range(16))
    assert b.view(torch.uint8).tolist() == list(range(16, 32))


def test_all_tensors_lie_in_one_piece_of_memory_each_where_a_device_reads_fast() -> None:
    # A call of the driver for each tensor would hold up an engine on the same device.
    staging = Staging(manifest())
    for index in range(3):
        staging.write_bucket(index, bucket(index))
    verified = staging.verify()
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in verified.tensors()}) == 1
    assert [data.storage_offset() % 256 for *_, data in verified.parts()] == [0, 0] and verified.num_bytes == 32


def test_a_bucket_of_the_host_reaches_a_device_in_one_piece_and_only_after_its_digests() -> None:
    # Tensor after tensor out of pageable memory would hold up an engine that shares the device.
    moved = []

    class Elsewhere(Side):
        def moved(self, tensor: torch.Tensor) -> torch.Tensor:
            moved.append(tensor.clone())
            return tensor.clone()

    staging = Staging(manifest(), side=Elsewhere(torch.device("cpu")))
    for index in range(3):
        staging.write_bucket(index, bucket(index))
    assert [tensor.tolist() for tensor in moved] == [bucket(index).tolist() for index in range(3)]
    (_, a), (_, b) = staging.verify().tensors()
    assert a.reshape(-1).view(torch.uint8).tolist() + b.view(torch.uint8).tolist() == list(range(32))


def test_no_room_is_said_with_the_arithmetic_and_the_largest_tensor() -> None:
    # 32 bytes wanted, 12 free of 80: 20 / 80 = 0.25 are lacking; both tensors have 16, the first is named.
    said = no_room([16, 16], manifest(), torch.device("cuda", 1), 12, 80)
    assert "version 7: staging of 32 bytes (the largest of 2 tensors is model.a.weight, 16 bytes) does not fit on cuda:1" in said
    assert "12 of 80 bytes free; lower gpu_memory_fraction by at least 0.25" in said


def test_a_flipped_bit_is_caught_and_names_its_tensor_alone() -> None:
    staging = Staging(manifest())
    for index in range(3):
        data = bucket(index)
        if index == 2:
            data[5] ^= 1
        staging.write_bucket(index, data)
    with pytest.raises(TransferError, match=r"1 of 4 slices .* in 1 of 2 tensors: model\.b\.weight; the old weights stay"):
        staging.verify()


def test_nothing_received_is_no_success() -> None:  # faults.md 14
    with pytest.raises(TransferError, match=r"4 of 4 slices .* in 2 of 2 tensors: model\.a\.weight, model\.b\.weight"):
        Staging(manifest()).verify()


def test_a_bucket_that_never_came_names_the_tensors_it_held() -> None:  # faults.md 5
    staging = Staging(manifest())
    staging.write_bucket(0, bucket(0))
    staging.write_bucket(1, bucket(1))
    with pytest.raises(TransferError, match=r"in 1 of 2 tensors: model\.b\.weight"):
        staging.verify()


def test_an_overwritten_bucket_buffer_does_not_reach_the_tensors() -> None:  # faults.md 9
    staging, buffer = Staging(manifest()), torch.empty(12, dtype=torch.uint8)
    for index in range(3):
        view = buffer[: BUCKETS[index][1]]
        view.copy_(bucket(index))
        staging.write_bucket(index, view)
    buffer.fill_(7)
    (_, a), (_, b) = staging.verify().tensors()
    assert torch.cat([a.reshape(-1).view(torch.uint8), b.view(torch.uint8)]).tolist() == list(range(32))


def test_a_dropped_slice_is_refused_before_any_byte_moves() -> None:
    broken = manifest()
    del broken.slices[3]
    with pytest.raises(TransferError, match=r"tensor model\.b\.weight: slices cover 8 bytes of 16"):
        Staging(broken)


def test_a_gap_inside_a_tensor_is_refused() -> None:
    broken = manifest()
    broken.slices[0].num_bytes = 8  # then 0..7 and 12..15 of 16
    with pytest.raises(TransferError, match=r"tensor model\.a\.weight: slices leave a gap at byte 8 of 16"):
        Staging(broken)


def test_slices_that_overlap_are_refused() -> None:
    broken = manifest()
    broken.slices[1].tensor_offset = 8
    with pytest.raises(TransferError, match=r"tensor model\.a\.weight: slices overlap at byte 8 of 16"):
        Staging(broken)


def test_another_bucket_size_than_the_slices_fill_is_refused_before_any_broadcast() -> None:  # faults.md 13
    broken = manifest()
    broken.buckets[1].num_bytes = 24
    with pytest.raises(TransferError, match=r"bucket 1 \(with model\.a\.weight, model\.b\.weight\): slices cover 12 bytes of 24"):
        Staging(broken)


def test_a_dtype_that_is_not_served_is_refused() -> None:
    broken = manifest()
    broken.tensors[0].dtype = "float64"
    with pytest.raises(TransferError, match=r"tensor model\.a\.weight has dtype 'float64'"):
        Staging(broken)


def test_a_wrong_prefix_shows_as_nothing_matched() -> None:  # faults.md 6
    wrong = manifest()
    for tensor in wrong.tensors:
        tensor.name = f"module.{tensor.name}"
    with pytest.raises(TransferError, match=r"0 of 2 names match; missing: model\.a\.weight, model\.b\.weight; unknown: module\.model\.a\.weight"):
        check_names(wrong, [("model.a.weight", (2, 2)), ("model.b.weight", (8,))])


def test_one_missing_one_unknown_and_one_reshaped_tensor_are_each_named() -> None:
    check_names(manifest(), [("model.a.weight", (2, 2)), ("model.b.weight", (8,))])
    with pytest.raises(TransferError, match=r"1 of 2 names match; missing: model\.c\.weight; unknown: model\.b\.weight; other shape: model\.a\.weight \[2, 2\] instead of \[4\]"):
        check_names(manifest(), [("model.a.weight", (4,)), ("model.c.weight", (8,))])


def test_chunks_of_a_fetch_come_in_order_and_end_verified() -> None:
    staging = Staging(manifest())
    for index, (start, size) in enumerate(BUCKETS):
        for at in range(0, size, 5):
            staging.write_chunk(index, at, CONTENT[start + at : min(start + at + 5, start + size)].tobytes())
    assert [name for name, _ in staging.verify().tensors()] == ["model.a.weight", "model.b.weight"]


@pytest.mark.parametrize(("chunk", "message"), [((0, 4, b"x"), "0 of its 12 bytes have come"), ((0, 0, bytes(13)), "with 13 bytes"), ((9, 0, b"x"), "has 3 buckets")])
def test_a_chunk_that_does_not_fit_is_refused(chunk: tuple[int, int, bytes], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        Staging(manifest()).write_chunk(*chunk)


def test_a_folder_is_read_like_a_transfer_and_a_short_file_is_refused(tmp_path: Path) -> None:  # faults.md 18
    (tmp_path / "manifest.bin").write_bytes(manifest().SerializeToString())
    (tmp_path / "rank-0.bin").write_bytes(CONTENT.tobytes())
    assert len(list(from_folder(tmp_path).tensors())) == 2
    (tmp_path / "rank-0.bin").write_bytes(CONTENT[:30].tobytes())
    with pytest.raises(TransferError, match=r"is short: bucket 2 has 8 bytes at 24, 6 were read"):
        from_folder(tmp_path)
