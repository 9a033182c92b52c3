"""What has changed between two versions, exactly: positions and new values of changed words, block by block.

A block (at most BLOCK_BYTES of one bucket) is a row of words of the element's size. Its data is, for changed words in ascending order,

    gaps    one byte each: words since the changed one before (or the block's start), 255 meaning "255 further, nothing changed there"
    values  the new words, little-endian, after all gaps

    old words 5 5 5 5, new 5 7 5 9: gaps 1 1, values 7 9 (a gap counts the words skipped)

The values are the new words and no differences, so that applying is a scatter; a block that would not become smaller is sent whole.
One change in a hundred costs about one byte of gap beside the value (a geometric gap of mean 99 passes 254 in 8 % of the cases).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError

BLOCK_BYTES = 16 << 20
_SKIP = 255
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
    gaps = _gaps(skipped)
    data = gaps.tobytes() + after[changed].tobytes()
    return (data, int(changed.size)) if len(data) < new.size else None


def _gaps(skipped: npt.NDArray[np.int64]) -> Bytes:
    """The bytes of all gaps: q times 255, then the rest."""
    jumps, rest = np.divmod(skipped, _SKIP)
    if not jumps.any():
        return rest.astype(np.uint8)
    ends = np.cumsum(jumps + 1)
    gaps = np.full(int(ends[-1]), _SKIP, dtype=np.uint8)
    gaps[ends - 1] = rest
    return gaps


def apply(block: Bytes, data: bytes, *, word_bytes: int, num_changed: int) -> None:
    """Writes the new words into the block, in place. Raises TransferError, before any write, for data that does not fit it."""
    word = _WORDS.get(word_bytes)
    num_gaps = len(data) - num_changed * word_bytes
    if word is None or num_gaps < num_changed or block.size % word_bytes:
        raise TransferError(f"a delta of {len(data)} bytes does not hold {num_changed} words of {word_bytes} bytes for a block of {block.size}")
    gaps = np.frombuffer(data, dtype=np.uint8, count=num_gaps)
    values = np.frombuffer(data, dtype=word, offset=num_gaps)
    if num_gaps == num_changed:
        positions = np.cumsum(gaps, dtype=np.int64)
    else:
        ends = gaps != _SKIP
        positions = np.cumsum(gaps, dtype=np.int64)[ends]
    positions += np.arange(positions.size)
    if positions.size != num_changed or (num_changed and positions[-1] >= block.size // word_bytes):
        raise TransferError(f"a delta names {positions.size} words, the last at {int(positions[-1]) if positions.size else -1}, where {num_changed} of {block.size // word_bytes} were announced")
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
