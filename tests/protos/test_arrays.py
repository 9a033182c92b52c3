"""A trajectory encoded around its arrays is the message that protobuf would have made."""

from __future__ import annotations

import numpy as np
import pytest

from protos import fields
from protos.arrays import encoded, pack_floats, pack_ids, unpack
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb


@pytest.mark.parametrize("num_tokens", [0, 1, 40, 5000])  # lengths whose varints take one, two and three bytes
def test_encoded_is_what_protobuf_reads_back(num_tokens: int) -> None:
    ids, logprobs, text = np.arange(num_tokens, dtype=np.int32), -np.arange(num_tokens, dtype=np.float32), "ä" * num_tokens
    rest = pb.Trajectory(group_id="g00000001", sample_index=2, spans=[pb.VersionSpan(version=3, end=num_tokens)], reward=pb.Reward(score=pb.Score(value=0.5)))
    whole = pb.Trajectory()
    whole.CopyFrom(rest)
    for field, value in ((whole.prompt_ids, pack_ids([7, 8])), (whole.completion_ids, pack_ids(ids)), (whole.logprobs, pack_floats(logprobs))):
        field.CopyFrom(value)
    whole.text = text
    read = pb.Trajectory.FromString(encoded(rest, prompt_ids=[7, 8], completion_ids=ids, logprobs=logprobs, text=text))
    assert read == whole
    assert np.array_equal(unpack(read.completion_ids), ids) and np.array_equal(unpack(read.logprobs), logprobs)


def test_arrays_need_not_lie_in_one_piece_nor_be_narrow() -> None:
    strided = np.arange(10, dtype=np.int32)[::2]
    read = pb.Trajectory.FromString(encoded(pb.Trajectory(), prompt_ids=[1], completion_ids=strided, logprobs=[0.5, -1.0]))
    assert unpack(read.completion_ids).tolist() == [0, 2, 4, 6, 8] and unpack(read.logprobs).tolist() == [0.5, -1.0]


@pytest.mark.parametrize("ids", [[3, -1], np.array([3, -1], dtype=np.int32), [2**31]])
def test_ids_that_int32_cannot_hold_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 2\*\*31\)"):
        encoded(pb.Trajectory(), prompt_ids=[1], completion_ids=ids, logprobs=[])


def test_a_key_is_protobufs_tag_and_length() -> None:
    # field 12, wire type 2: 12 << 3 | 2 = 98; 300 = 0b10_0101100; 20000 = 1_0011100_0100000
    assert fields.key(12, 5) == bytes((98, 5))
    assert fields.key(12, 300) == bytes((98, 0b10101100, 0b10))
    assert fields.key(12, 20_000) == bytes((98, 0b10100000, 0b10011100, 1))


def test_bytes_that_are_no_whole_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="has 5 bytes, not a multiple of 4"):
        unpack(pb.PackedArray(dtype=pb.PACKED_DTYPE_INT32, data=b"12345"))
    with pytest.raises(ValueError, match="no known dtype: 0"):
        unpack(pb.PackedArray(data=b"1234"))
