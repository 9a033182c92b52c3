"""The payload of a submitted sample, looked at by itself: a serialized `Trajectory` of the public contract."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from google.protobuf.message import DecodeError

from deploy.audit.findings import Findings
from protos.trajectory.v1alpha1 import trajectory_pb2

IDENTITY = "a payload is that of its record"
SOUND = "a payload is sound"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What counts of one sample. tokens: (version, trained tokens that it drew), as its spans and its mask say."""

    usable: bool
    reward: float | None
    tokens: tuple[tuple[int, int], ...]


def group_name(seq: int) -> str:
    return f"g{seq:08d}"


def of_record(record: dict[str, Any]) -> Sample:
    """As the account's own record has it."""
    facts = record["facts"]
    return Sample(usable=not facts["unusable_reason"], reward=facts["reward"], tokens=tuple((version, count) for version, count in facts["spans"]))


def prompts_of(run_dir: Path) -> list[bytes] | None:
    """Token ids of each prompt row, as little-endian int32; None where the run has not rendered them. Raises ValueError."""
    path = run_dir / "resolved" / "prompts.msgpack"
    if not path.is_file():
        return None
    try:
        return list(msgpack.unpackb(path.read_bytes())["value"]["ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error}); delete it, the next start of the learner makes it again") from None


def prompts_since(run_dir: Path) -> int:
    """Number of the first group that has a prompt of the present data: 0 unless the data were exchanged."""
    path = run_dir / "resolved" / "data_began"
    return int(path.read_text()) if path.is_file() else 0


def check(payload: bytes, key: tuple[int, int], booked: Sample | None, prompt: bytes | None, where: str, findings: Findings) -> Sample | None:
    """The sample as the payload says; each difference to what is booked is a finding.

    key: (number of the group, sample index). booked: None, nothing is known of it. prompt: ids of the group's prompt, None: unknown.
    """
    name = f"sample ({group_name(key[0])}, {key[1]})"
    trajectory = trajectory_pb2.Trajectory()
    try:
        trajectory.ParseFromString(payload)
    except DecodeError as error:
        findings.must(False, IDENTITY, where, f"{name}: {len(payload)} bytes are no trajectory: {error}")
        return booked
    said = (trajectory.group_id, trajectory.sample_index)
    findings.must(said == (group_name(key[0]), key[1]), IDENTITY, where, f"{name}: the payload is that of {said}")
    if prompt is not None and not trajectory.own_prompt:
        same = trajectory.prompt_ids.data == prompt
        findings.must(same, IDENTITY, where, f"{name}: its prompt is not that of the group ({len(trajectory.prompt_ids.data) // 4} ids against {len(prompt) // 4})")
    own = _sample(trajectory, name, where, findings)
    if booked is None:
        return own
    findings.must(own.tokens == booked.tokens, IDENTITY, where, f"{name}: the payload's tokens by version are {own.tokens}, the account's {booked.tokens}")
    findings.must(own.reward == booked.reward, IDENTITY, where, f"{name}: the payload's reward is {own.reward}, the account's {booked.reward}")
    findings.must(own.usable or not booked.usable, SOUND, where, f"{name}: booked as usable, but it has no finite score or log-probs, or was aborted")
    return Sample(usable=booked.usable, reward=own.reward, tokens=own.tokens)


def _sample(trajectory: trajectory_pb2.Trajectory, name: str, where: str, findings: Findings) -> Sample:
    parts: list[trajectory_pb2.Trajectory | trajectory_pb2.Strand] = [trajectory, *trajectory.more_strands]
    strands = [_strand(words, f"{name}, strand {place}", where, findings) for place, words in enumerate(parts) if words.completion_ids.data or not trajectory.unusable_reason]
    scored = trajectory.reward.WhichOneof("outcome") == "score" and math.isfinite(trajectory.reward.score.value)
    tokens = tuple(pair for _, own in strands for pair in own)
    whole = not trajectory.unusable_reason and trajectory.finish_reason != trajectory_pb2.FINISH_REASON_ABORT
    usable = scored and whole and all(finite for finite, _ in strands) and sum(count for _, count in tokens) > 0
    return Sample(usable=bool(usable), reward=trajectory.reward.score.value if scored else None, tokens=tokens)


def _strand(words: trajectory_pb2.Trajectory | trajectory_pb2.Strand, name: str, where: str, findings: Findings) -> tuple[bool, tuple[tuple[int, int], ...]]:
    """Whether its log-probs are finite, and (version, trained tokens) of its spans."""
    num_tokens = len(words.completion_ids.data) // 4
    logprobs = np.frombuffer(words.logprobs.data, "<f4")
    mask = np.frombuffer(words.loss_mask.data or b"\x01" * num_tokens, np.uint8)
    ends = [0, *(span.end for span in words.spans)]
    follow = [span.start for span in words.spans] == ends[:-1] and ends == sorted(set(ends)) and ends[-1] == num_tokens
    versions = [span.version for span in words.spans]
    findings.must(
        num_tokens > 0 and len(logprobs) == len(mask) == num_tokens and follow and versions == sorted(versions), SOUND, where,
        f"{name}: {num_tokens} tokens, {len(logprobs)} log-probs, {len(mask)} mask values, spans {[(s.version, s.start, s.end) for s in words.spans]}",
    )  # fmt: skip
    return bool(np.isfinite(logprobs).all()), tuple((span.version, int(mask[span.start : span.end].sum())) for span in words.spans)
