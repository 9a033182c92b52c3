"""Lossless deltas against the dense way, on one version of which 1 % of the elements changed: `python -m benchmarks.delta --json`.

A bfloat16 version of 256 MB; the changed elements are drawn at random and moved by a unit in the last place or a few, as an optimizer
step moves them. smaller: bytes of the version over bytes of the delta. The peer is XOR with the old version, compressed by zstd (level
1, its fastest that still packs zeros well), decompressed and XORed upon the old version in place. Both give back the same bytes, which
are compared after every turn, outside the time; both check what was sent by a digest of it, inside. notes has the ratio with the digest
of the whole result inside the time as well.
"""

from __future__ import annotations

import time

import numpy as np
import xxhash
import zstandard

from benchmarks import _line
from benchmarks._line import Bar, Pair
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import delta

NUM_BYTES = 256 << 20
Bytes = delta.Bytes


def versions(share: float, seed: int = 1) -> tuple[Bytes, Bytes]:
    """Weights as bfloat16 bits, and a successor with `share` of its elements changed."""
    draw = np.random.default_rng(seed)
    old = (draw.standard_normal(NUM_BYTES // 2, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    changed = draw.choice(old.size, int(share * old.size), replace=False)
    new[changed] += draw.choice(np.array([1, 2, 3, 65535, 65534], dtype=np.uint16), changed.size)
    return old.view(np.uint8), new.view(np.uint8)


def manifest() -> manifest_pb2.Manifest:
    made = manifest_pb2.Manifest(version=2)
    made.tensors.add(name="w", shape=[NUM_BYTES // 2], dtype="bfloat16")
    made.slices.add(tensor=0, num_bytes=NUM_BYTES, bucket=0)
    made.buckets.add(num_bytes=NUM_BYTES)
    return made


class Ours:
    def __init__(self, old: Bytes, new: Bytes) -> None:
        began = time.perf_counter()
        self.sent = list(delta.parts(manifest(), 0, old, new))
        self.encode_s = time.perf_counter() - began
        self.num_bytes = sum(part.ByteSize() for part in self.sent)

    def apply(self, target: Bytes) -> None:
        for part in self.sent:
            delta.check_part(part)
        for part in self.sent:
            delta.apply_part(target, part)


class XorZstd:
    def __init__(self, old: Bytes, new: Bytes) -> None:
        began = time.perf_counter()
        blocks = range(0, NUM_BYTES, delta.BLOCK_BYTES)
        packer = zstandard.ZstdCompressor(level=1)
        self.sent = [packer.compress(np.bitwise_xor(old[at : at + delta.BLOCK_BYTES], new[at : at + delta.BLOCK_BYTES]).tobytes()) for at in blocks]
        self.digests = [xxhash.xxh3_64_intdigest(data) for data in self.sent]
        self.encode_s = time.perf_counter() - began
        self.num_bytes = sum(map(len, self.sent))

    def apply(self, target: Bytes) -> None:
        unpacker = zstandard.ZstdDecompressor()
        for data, digest in zip(self.sent, self.digests, strict=True):
            if xxhash.xxh3_64_intdigest(data) != digest:
                raise RuntimeError("a block differs from its digest")
        for index, data in enumerate(self.sent):
            block = target[index * delta.BLOCK_BYTES : (index + 1) * delta.BLOCK_BYTES]
            words = block.view(np.uint64)
            np.bitwise_xor(words, np.frombuffer(unpacker.decompress(data), dtype=np.uint64), out=words)


def timed(way: Ours | XorZstd, old: Bytes, target: Bytes, expected: int) -> tuple[float, float]:
    """(seconds with the digest of the result, seconds without). Raises RuntimeError for other bytes."""
    np.copyto(target, old)
    began = time.perf_counter()
    way.apply(target)
    applied = time.perf_counter()
    if xxhash.xxh3_64_intdigest(target.data) != expected:
        raise RuntimeError(f"{type(way).__name__} gave other bytes")
    return time.perf_counter() - began, applied - began


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.01, help="of elements changed")
    options = parser.parse_args()
    old, new = versions(options.share)
    ours, peer, target, expected = Ours(old, new), XorZstd(old, new), np.empty_like(old), xxhash.xxh3_64_intdigest(new.data)
    pairs: list[Pair] = []
    for turn in range(max(options.pairs, _line.MIN_PAIRS)):
        order: list[Ours | XorZstd] = [ours, peer] if turn % 2 else [peer, ours]
        found = {type(way).__name__: timed(way, old, target, expected) for way in order}
        pairs.append({"ours_s": found["Ours"][0], "xor_zstd_s": found["XorZstd"][0], "ours_bare_s": found["Ours"][1], "xor_zstd_bare_s": found["XorZstd"][1]})
    bars = [
        Bar(name="smaller", value=NUM_BYTES / ours.num_bytes, op=">=", bar=45),
        Bar(name="apply_vs_xor_zstd", value=_line.ratio(pairs, "xor_zstd_bare_s", "ours_bare_s"), op=">=", bar=5),
    ]
    notes = {
        "apply_vs_xor_zstd_with_digest_of_result": round(_line.ratio(pairs, "xor_zstd_s", "ours_s"), 2), "delta_bytes": ours.num_bytes, "xor_zstd_bytes": peer.num_bytes,
        "encode_s": round(ours.encode_s, 3), "xor_zstd_encode_s": round(peer.encode_s, 3), "share": options.share,
    }  # fmt: skip
    _line.report("delta", bars=bars, pairs=pairs, packages=("numpy", "zstandard", "xxhash"), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
