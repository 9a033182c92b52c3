"""Time to encode and decode one trajectory of 26 KiB: `python -m benchmarks.codec --json`.

From numpy arrays (int32 ids, float32 log-probs), text and small fields to bytes with a CRC-32, and back to numpy arrays after the
CRC is checked. All three carry the same content and make the same checks: every range and dtype that `protos.arrays` checks is our
own; the CRC-32 is on all sides, by the same library (ISA-L, some twelve times as fast as zlib). Time is processor time of the one thread, so a busy machine disturbs less.

ours                    the Trajectory message with its packed arrays, under the head of a journal entry
vs_msgpack_raw          time over that of msgpack with the arrays as raw bytes: no schema, no dtype
vs_protobuf_repeated    time of protobuf with repeated fields over ours
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from isal.isal_zlib import crc32

from benchmarks import _line
from benchmarks._line import Bar
from learner.gateway.segments import HEAD_BYTES, head
from protos.arrays import encoded, unpack
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb

PROMPT_TOKENS, COMPLETION_TOKENS, TEXT_BYTES = 256, 2048, 9000
ROUNDS = 300  # encodings and decodings in one timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What is encoded, and what must come back."""

    prompt_ids: npt.NDArray[np.int32]
    completion_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    text: str
    group_id: str = "g00000012"
    sample_index: int = 3
    version: int = 17
    reward: float = 0.5
    scorer: str = "main"
    replica_id: str = "replica-3"

    def same(self, other: Content) -> bool:
        arrays = all(np.array_equal(getattr(self, name), getattr(other, name)) and getattr(self, name).dtype == getattr(other, name).dtype for name in ("prompt_ids", "completion_ids", "logprobs"))
        return arrays and all(getattr(self, name) == getattr(other, name) for name in ("text", "group_id", "sample_index", "version", "reward", "scorer", "replica_id"))


def content() -> Content:
    random = np.random.default_rng(1)
    return Content(
        prompt_ids=random.integers(0, 50_000, PROMPT_TOKENS).astype(np.int32),
        completion_ids=random.integers(0, 50_000, COMPLETION_TOKENS).astype(np.int32),
        logprobs=-random.exponential(size=COMPLETION_TOKENS).astype(np.float32),
        text="".join(chr(97 + letter) for letter in random.integers(0, 26, TEXT_BYTES)),
    )


def encode_ours(value: Content) -> bytes:
    rest = pb.Trajectory(group_id=value.group_id, sample_index=value.sample_index, finish_reason=pb.FINISH_REASON_STOP, replica_id=value.replica_id)
    rest.spans.add(version=value.version, start=0, end=len(value.completion_ids))
    reward = rest.reward
    reward.score.value, reward.scorer = value.reward, value.scorer
    payload = encoded(rest, prompt_ids=value.prompt_ids, completion_ids=value.completion_ids, logprobs=value.logprobs, text=value.text)
    return head(b"", payload, 0) + payload


def decode_ours(data: bytes) -> Content:
    payload = memoryview(data)[HEAD_BYTES:]
    if head(b"", payload, 0) != data[:HEAD_BYTES]:
        raise ValueError("the checksum does not match")
    read = pb.Trajectory.FromString(payload)  # type: ignore[arg-type]
    reward = read.reward
    return Content(
        prompt_ids=unpack(read.prompt_ids), completion_ids=unpack(read.completion_ids), logprobs=unpack(read.logprobs), text=read.text,  # type: ignore[arg-type]
        group_id=read.group_id, sample_index=read.sample_index, version=read.spans[0].version, reward=reward.score.value, scorer=reward.scorer, replica_id=read.replica_id,
    )  # fmt: skip


def with_crc(payload: bytes) -> bytes:
    return crc32(payload).to_bytes(4, "little") + payload


def without_crc(data: bytes) -> memoryview:
    payload = memoryview(data)[4:]
    if crc32(payload).to_bytes(4, "little") != data[:4]:
        raise ValueError("the checksum does not match")
    return payload


def msgpack_payload(value: Content) -> bytes:
    return msgpack.packb({  # type: ignore[no-any-return]
        "group_id": value.group_id, "sample_index": value.sample_index, "prompt_ids": value.prompt_ids.tobytes(), "completion_ids": value.completion_ids.tobytes(),
        "logprobs": value.logprobs.tobytes(), "spans": [[value.version, 0, len(value.completion_ids)]], "finish_reason": 1,
        "reward": value.reward, "scorer": value.scorer, "text": value.text, "replica_id": value.replica_id,
    })  # fmt: skip


def msgpack_content(payload: bytes | memoryview) -> Content:
    read = msgpack.unpackb(payload)
    return Content(
        prompt_ids=np.frombuffer(read["prompt_ids"], "<i4"), completion_ids=np.frombuffer(read["completion_ids"], "<i4"), logprobs=np.frombuffer(read["logprobs"], "<f4"),
        text=read["text"], group_id=read["group_id"], sample_index=read["sample_index"], version=read["spans"][0][0], reward=read["reward"], scorer=read["scorer"], replica_id=read["replica_id"],
    )  # fmt: skip


def repeated_class() -> Any:
    """The message class with arrays as repeated (packed) fields, made here since nothing else needs it."""
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="bench_repeated.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Repeated")
    fields = [
        ("group_id", kind.TYPE_STRING, False), ("sample_index", kind.TYPE_UINT32, False), ("prompt_ids", kind.TYPE_INT32, True), ("completion_ids", kind.TYPE_INT32, True),
        ("logprobs", kind.TYPE_FLOAT, True), ("spans", kind.TYPE_UINT64, True), ("finish_reason", kind.TYPE_UINT32, False), ("reward", kind.TYPE_DOUBLE, False),
        ("scorer", kind.TYPE_STRING, False), ("text", kind.TYPE_STRING, False), ("replica_id", kind.TYPE_STRING, False),
    ]  # fmt: skip
    for number, (name, of, many) in enumerate(fields, 1):
        message.field.add(name=name, number=number, type=of, label=kind.LABEL_REPEATED if many else kind.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Repeated"))


Repeated = repeated_class()


def encode_repeated(value: Content) -> bytes:
    made = Repeated(
        group_id=value.group_id, sample_index=value.sample_index, prompt_ids=value.prompt_ids.tolist(), completion_ids=value.completion_ids.tolist(),
        logprobs=value.logprobs.tolist(), spans=[value.version, 0, len(value.completion_ids)], finish_reason=1, reward=value.reward, scorer=value.scorer,
        text=value.text, replica_id=value.replica_id,
    )  # fmt: skip
    return with_crc(made.SerializeToString())


def decode_repeated(data: bytes) -> Content:
    read = Repeated.FromString(without_crc(data))
    return Content(
        prompt_ids=np.array(list(read.prompt_ids), np.int32), completion_ids=np.array(list(read.completion_ids), np.int32), logprobs=np.array(list(read.logprobs), np.float32),
        text=read.text, group_id=read.group_id, sample_index=read.sample_index, version=read.spans[0], reward=read.reward, scorer=read.scorer, replica_id=read.replica_id,
    )  # fmt: skip


def timed(encode: Callable[[Content], bytes], decode: Callable[[bytes], Content], value: Content) -> Callable[[], float]:
    """Processor microseconds of one encoding and decoding. Raises RuntimeError when something else comes back."""
    if not decode(encode(value)).same(value):
        raise RuntimeError(f"{encode.__name__}: what comes back is not what went in")

    def measure() -> float:
        began_s = time.thread_time()
        for _ in range(ROUNDS):
            decode(encode(value))
        return 1e6 * (time.thread_time() - began_s) / ROUNDS

    return measure


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    value = content()
    measures = {
        "ours": timed(encode_ours, decode_ours, value),
        "msgpack_raw": timed(lambda v: with_crc(msgpack_payload(v)), lambda d: msgpack_content(without_crc(d)), value),
        "protobuf_repeated": timed(encode_repeated, decode_repeated, value),
        "msgpack_raw_no_crc": timed(msgpack_payload, msgpack_content, value),
    }
    pairs = _line.interleaved(measures, num_pairs=options.pairs)
    bars = [
        Bar(name="vs_msgpack_raw", value=_line.ratio(pairs, "ours", "msgpack_raw"), op="<=", bar=1.5),
        Bar(name="vs_protobuf_repeated", value=_line.ratio(pairs, "protobuf_repeated", "ours"), op=">=", bar=20),
    ]
    notes = {"unit": "microseconds", "bytes": len(encode_ours(value)), "vs_msgpack_raw_without_its_crc": round(_line.ratio(pairs, "ours", "msgpack_raw_no_crc"), 2)}
    _line.report("codec", bars=bars, pairs=pairs, packages=("protobuf", "msgpack", "numpy", "isal"), quiet=options.json, notes=notes)


if __name__ == "__main__":
    main()
