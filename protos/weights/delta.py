"""What has changed between two versions, exactly: positions and new values of changed words, block by block.

A block (at most BLOCK_BYTES of one bucket) is a row of words of the element's size. Its data is, for changed words in ascending order,

    L            uint32, how many words lie far from the one before
    index, more  L uint32 each: which of the changed words, and how much farther than its near byte says
    values       the new words; all little-endian
    near         one byte each: words since the changed one before (or the block's start), at most 255

    old words 5 5 5 5, new 5 7 5 9: L = 0, values 7 9, near 1 1 (a distance counts the words skipped)

The values are the new words and no differences, and nothing has to be looked for, so that applying is a running sum and a scatter; a
block that would not become smaller is sent whole. One change in a hundred costs one byte of distance beside its value, and 8 more in
the 8 % of the cases in which more than 255 words were skipped (geometric distances of mean 99).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError

BLOCK_BYTES = 16 << 20
_NEAR = 255
_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
Bytes = npt.NDArray[np.uint8]


def encode(old: Bytes, new: Bytes, *, word_bytes: int) -> tuple[bytes, int] | None:
    """(data, number of changed words) of one block; None where it is not smaller than the block itself."""
    assert old.size == new.size and new.size % word_bytes == 0, "blocks of one layout have one size, a multiple of the word"
    word = _WORDS[word_bytes]
    before, after = old.view(word), new.view(word)
    changed = np.flatnonzero(before != after)
    if changed.size * (word_bytes + 1) >= new.size:
        return None
    skipped = np.diff(changed, prepend=-1) - 1
    far = np.flatnonzero(skipped > _NEAR).astype(np.uint32)
    more = (skipped[far] - _NEAR).astype(np.uint32)
    near = np.minimum(skipped, _NEAR).astype(np.uint8)
    data = b"".join([len(far).to_bytes(4, "little"), far.tobytes(), more.tobytes(), after[changed].tobytes(), near.tobytes()])
    return (data, int(changed.size)) if len(data) < new.size else None


def apply(block: Bytes, data: bytes, *, word_bytes: int, num_changed: int) -> None:
    """Writes the new words into the block, in place. Raises TransferError, before any write, for data that does not fit it."""
    word = _WORDS.get(word_bytes)
    num_far = int.from_bytes(data[:4], "little")
    start = 4 + 8 * num_far
    if word is None or len(data) != start + num_changed * (1 + word_bytes) or block.size % word_bytes or (num_far and not num_changed):
        raise TransferError(f"a delta of {len(data)} bytes does not hold {num_changed} words of {word_bytes} bytes, {num_far} of them far, for a block of {block.size}")
    values = np.frombuffer(data, dtype=word, count=num_changed, offset=start)  # aligned: what comes before is a multiple of 4 bytes
    positions = np.frombuffer(data, dtype=np.uint8, offset=start + num_changed * word_bytes).astype(np.int64)
    positions[1:] += 1  # from the word after the changed one before
    if num_far:
        far, more = np.frombuffer(data, dtype=np.uint32, count=2 * num_far, offset=4).reshape(2, num_far)
        if far[-1] >= num_changed:
            raise TransferError(f"a delta names changed word {far[-1]} of {num_changed}")
        positions[far] += more
    np.cumsum(positions, out=positions)
    if num_changed and positions[-1] >= block.size // word_bytes:
        raise TransferError(f"a delta names word {positions[-1]} of a block of {block.size // word_bytes}")
    block.view(word)[positions] = values


def parts(manifest: manifest_pb2.Manifest, bucket: int, old: Bytes, new: Bytes) -> Iterator[manifest_pb2.DeltaPart]:
    """The changes of one bucket, unchanged blocks left out."""
    word_bytes = word_of(manifest, bucket)
    for offset in range(0, new.size, BLOCK_BYTES):
        block_old, block_new = old[offset : offset + BLOCK_BYTES], new[offset : offset + BLOCK_BYTES]
        encoded = encode(block_old, block_new, word_bytes=word_bytes)
        data, num_changed, width = (block_new.tobytes(), 0, 0) if encoded is None else (*encoded, word_bytes)
        if width and not num_changed:
            continue
        yield manifest_pb2.DeltaPart(
            bucket=bucket, offset=offset, num_bytes=block_new.size, word_bytes=width, num_changed=num_changed, data=data, digest=xxhash.xxh3_64_intdigest(data)
        )  # fmt: skip


def apply_part(bucket: Bytes, part: manifest_pb2.DeltaPart) -> None:
    """Writes a part into its bucket's bytes, in place. Raises TransferError, before any write, for one that does not fit."""
    block = bucket[part.offset : part.offset + part.num_bytes]
    if block.size != part.num_bytes:
        raise TransferError(f"a delta's block at {part.offset} of {part.num_bytes} bytes does not lie in its bucket of {bucket.size}")
    if part.word_bytes:
        apply(block, part.data, word_bytes=part.word_bytes, num_changed=part.num_changed)
    elif len(part.data) != block.size:
        raise TransferError(f"a delta's whole block has {len(part.data)} bytes instead of {block.size}")
    else:
        block[:] = np.frombuffer(part.data, dtype=np.uint8)


def check_part(part: manifest_pb2.DeltaPart) -> None:
    """Raises TransferError for data with another digest than it was sent with."""
    if xxhash.xxh3_64_intdigest(part.data) != part.digest:
        raise TransferError(f"a delta of bucket {part.bucket} at {part.offset} differs from its digest; nothing was applied")


def word_of(manifest: manifest_pb2.Manifest, bucket: int) -> int:
    """Bytes of a word of one bucket: of its tensors' elements where they agree and fill it, else the widest that fills it."""
    sizes = {_ITEMSIZE[manifest.tensors[piece.tensor].dtype] for piece in manifest.slices if piece.bucket == bucket}
    widest = max(sizes) if len(sizes) == 1 else min(sizes, default=1)
    return next(width for width in (4, 2, 1) if width <= widest and manifest.buckets[bucket].num_bytes % width == 0)


def layout_digest(manifest: manifest_pb2.Manifest) -> int:
    """Of everything but the content: two versions with one layout digest have their bytes at the same places."""
    bare = manifest_pb2.Manifest(tensors=manifest.tensors, buckets=manifest.buckets)
    digest = xxhash.xxh3_64(bare.SerializeToString(deterministic=True))
    digest.update(np.array([[s.tensor, s.tensor_offset, s.num_bytes, s.bucket, s.bucket_offset, s.num_runs, s.stride_bytes] for s in manifest.slices], dtype=np.uint64).tobytes())
    return digest.intdigest()


def check_plan(plan: manifest_pb2.DeltaPlan, *, have_version: int, version: int) -> None:
    """Raises TransferError unless the steps lead from the one version to the other without a gap."""
    steps: Sequence[manifest_pb2.DeltaStep] = plan.steps
    chain = [have_version, *(step.to_version for step in steps)]
    if [step.from_version for step in steps] != chain[:-1] or chain[-1] != version:
        named = ", ".join(f"{step.from_version} to {step.to_version}" for step in steps) or "nothing"
        raise TransferError(f"a delta from version {have_version} to {version} was asked for, its steps are {named}")
