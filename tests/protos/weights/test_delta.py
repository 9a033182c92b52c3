"""Deltas are exact whatever changed, and refuse what does not fit before they write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import delta
from protos.weights.errors import TransferError


def test_the_example_of_the_page() -> None:
    old, new = np.array([5, 5, 5, 5], dtype=np.uint16).view(np.uint8), np.array([5, 7, 5, 9], dtype=np.uint16).view(np.uint8)
    assert delta.encode(old, new, word_bytes=2) is None  # 4 + 2 + 4 bytes are more than 8
    old, new = (np.concatenate([side, side[:2].repeat(8)]) for side in (old, new))
    new[8:] = old[8:]
    assert delta.encode(old, new, word_bytes=2) == (bytes([0, 0, 0, 0, 7, 0, 9, 0, 1, 1]), 2)


def test_words_that_lie_far_are_named_with_how_much_farther() -> None:
    old = np.zeros(2000, dtype=np.uint16)
    new = old.copy()
    new[[0, 256, 513, 1024]] = 1  # 0, 255, 256 = 255 + 1 and 510 = 255 + 255 words skipped
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8), word_bytes=2)
    far = np.array([2, 2, 3, 1, 255], dtype=np.uint32).tobytes()  # L, two indices, two distances
    assert encoded == (far + new[[0, 256, 513, 1024]].tobytes() + bytes([0, 255, 255, 255]), 4)


@given(
    st.sampled_from([1, 2, 4]), arrays.arrays(np.uint8, st.integers(1, 300).map(lambda n: 16 * n)), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=40),
    st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_applying_gives_every_byte_of_the_new_version(word: int, old: np.ndarray, changes: list[tuple[int, int]], stretch: int) -> None:
    new = old.copy()
    for at, value in changes:
        new[(at * stretch) % new.size] = value
    encoded = delta.encode(old, new, word_bytes=word)
    if encoded is None:
        return  # sent whole
    data, num = encoded
    assert len(data) < new.size
    block = old.copy()
    delta.apply(block, data, word_bytes=word, num_changed=num)
    assert np.array_equal(block, new)


def manifest(num_bytes: int = 64, dtype: str = "bfloat16") -> manifest_pb2.Manifest:
    made = manifest_pb2.Manifest(version=3)
    made.tensors.add(name="w", shape=[num_bytes // 2], dtype=dtype)
    made.slices.add(tensor=0, num_bytes=num_bytes, bucket=0)
    made.buckets.add(num_bytes=num_bytes)
    return made


def test_a_block_of_which_all_changed_is_sent_whole_and_an_unchanged_one_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_BYTES", 16)
    old = np.zeros(64, dtype=np.uint8)
    new = old.copy()
    new[16:32] = 9
    new[40] = 1
    found = list(delta.parts(manifest(), 0, old, new))
    assert [(part.offset, part.word_bytes, part.num_changed, part.num_bytes) for part in found] == [(16, 0, 0, 16), (32, 2, 1, 16)]
    for part in found:
        delta.check_part(part)
        delta.apply_part(old, part)
    assert np.array_equal(old, new)


NONE_FAR = bytes(4)


@pytest.mark.parametrize(
    ("data", "num", "size"),
    [
        (NONE_FAR + b"\x00\x01", 1, 8),  # half a value
        (NONE_FAR + b"\x01\x00\x09", 1, 8),  # word 9 of 4
        (b"\x01\x00\x00\x00" + b"\x05\x00\x00\x00" + b"\x01\x00\x00\x00" + b"\x01\x00\x00", 1, 8),  # the sixth of one changed word
        (b"", 1, 8),
        (NONE_FAR + b"\x01\x00\x02\x00\x00\x00", 2, 2),  # two words for a block of one
    ],
)
def test_data_that_does_not_fit_changes_nothing(data: bytes, num: int, size: int) -> None:
    block = np.zeros(size, dtype=np.uint8)
    with pytest.raises(TransferError):
        delta.apply(block, data, word_bytes=2, num_changed=num)
    assert not block.any()


def test_a_flipped_bit_is_found_by_the_part_s_digest() -> None:
    (part,) = delta.parts(manifest(), 0, np.zeros(64, dtype=np.uint8), np.arange(64, dtype=np.uint8) // 60)
    part.data = part.data[:-1] + bytes([part.data[-1] ^ 1])
    with pytest.raises(TransferError, match="bucket 0 at 0 differs from its digest; nothing was applied"):
        delta.check_part(part)


def test_a_chain_must_lead_from_what_is_held_to_what_is_wanted() -> None:
    plan = manifest_pb2.DeltaPlan(steps=[manifest_pb2.DeltaStep(from_version=3, to_version=4), manifest_pb2.DeltaStep(from_version=4, to_version=6)])
    delta.check_plan(plan, have_version=3, version=6)
    with pytest.raises(TransferError, match="from version 2 to 6 was asked for, its steps are 3 to 4, 4 to 6"):
        delta.check_plan(plan, have_version=2, version=6)


def test_words_are_elements_and_a_layout_is_all_but_the_content() -> None:
    assert delta.word_of(manifest(), 0) == 2 and delta.word_of(manifest(dtype="float32"), 0) == 4 and delta.word_of(manifest(num_bytes=6, dtype="float32"), 0) == 2
    other = manifest()
    other.version, other.slices[0].digest = 9, 77
    assert delta.layout_digest(other) == delta.layout_digest(manifest())
    other.slices[0].bucket_offset = 2
    assert delta.layout_digest(other) != delta.layout_digest(manifest())
