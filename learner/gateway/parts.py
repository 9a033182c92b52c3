"""What has been drawn of a sample that is not submitted yet, as its holders reported it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import xxhash

ID_BYTES = 4

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Completion tokens [start, start + n) and the spans of [0, start + n). One that is kept has start 0.

    Example, 3 tokens of which version 7 drew two: Part(start=0, ids=<12 bytes>, logprobs=<12 bytes>, spans=((7, 2), (8, 1)), finish="")
    """

    start: int
    ids: bytes  # little-endian int32
    logprobs: bytes  # little-endian float32, as many
    spans: tuple[tuple[int, int], ...]  # (version, tokens), in order; they sum to end
    finish: Finish  # empty: more tokens are to be drawn

    def __post_init__(self) -> None:
        num_tokens = len(self.ids) // ID_BYTES
        if len(self.logprobs) != len(self.ids) or len(self.ids) % ID_BYTES:
            raise ValueError(f"{len(self.ids)} bytes of ids and {len(self.logprobs)} of log-probs: both must be whole and as many")
        if not num_tokens and not self.finish:
            raise ValueError("a part without tokens must at least say that the sample is finished")
        if any(count < 1 for _, count in self.spans) or sum(count for _, count in self.spans) != self.end:
            raise ValueError(f"spans {self.spans} do not cover [0, {self.end}): every token carries its version")
        versions = [version for version, _ in self.spans]
        if versions != sorted(versions):
            raise ValueError(f"spans {self.spans}: versions must not fall")

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // ID_BYTES

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + len(self.logprobs)

    def followed_by(self, more: Part) -> Part:
        """The two as one. Raises ValueError where `more` does not follow or says other spans of what is known."""
        if more.start != self.end:
            raise ValueError(f"a part from token {more.start} on does not follow {self.end} tokens")
        if _cut(more.spans, self.end) != _cut(self.spans, self.end):
            raise ValueError(f"spans {more.spans} contradict {self.spans}, which were reported before")
        return Part(start=self.start, ids=self.ids + more.ids, logprobs=self.logprobs + more.logprobs, spans=more.spans, finish=more.finish)

    def to_record(self) -> dict[str, Any]:
        return {"start": self.start, "ids": self.ids, "logprobs": self.logprobs, "spans": [list(span) for span in self.spans], "finish": self.finish}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Part:
        return cls(
            start=record["start"], ids=record["ids"], logprobs=record["logprobs"], finish=record["finish"], spans=tuple((version, count) for version, count in record["spans"]),
        )  # fmt: skip


def digest_of(ids: bytes) -> int:
    """What a report says of the tokens before its own."""
    return xxhash.xxh3_64_intdigest(ids)


def _cut(spans: tuple[tuple[int, int], ...], num_tokens: int) -> list[tuple[int, int]]:
    """The spans of the first num_tokens tokens, neighbours of one version as one."""
    found: list[tuple[int, int]] = []
    for version, count in spans:
        taken = min(count, num_tokens)
        num_tokens -= taken
        if taken and found and found[-1][0] == version:
            found[-1] = (version, found[-1][1] + taken)
        elif taken:
            found.append((version, taken))
    return found
