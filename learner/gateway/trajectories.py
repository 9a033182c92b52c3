"""What the account must know of a submitted trajectory, and whether it is well formed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.gateway.groups import SampleFacts
from protos.arrays import unpack
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb

_UINT32 = np.dtype("<u4")


MAX_STRANDS = 64  # contexts of one sample; each is computed by itself

_Words = pb.Trajectory | pb.Strand  # what has prompt_ids, completion_ids, logprobs, loss_mask and spans


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """What is counted of one strand."""

    num_tokens: int
    num_trained: int
    is_finite: bool  # whether all its log-probs are
    spans: tuple[tuple[int, int], ...]


def facts_of(trajectory: pb.Trajectory, *, prompt_ids: bytes | None, vocabulary: int, max_new_tokens: int | None = None) -> SampleFacts:
    """The facts of a well-formed trajectory; what cannot be trained on carries its reason.

    prompt_ids: the leased prompt as little-endian int32 bytes; None: nothing to compare with. max_new_tokens: what the lease allows;
    a longer completion would overrun the model or the trainer's memory, and again after each restart, since plans are replayed. A sample
    of several strands or with a prompt of its own may make each context as long as the leased prompt and max_new_tokens together.
    Raises ValueError naming the rule and the values for a malformed one.
    """
    num_prompt = _prompt(trajectory, trajectory, vocabulary if trajectory.own_prompt else None)
    if prompt_ids is not None and not trajectory.own_prompt and trajectory.prompt_ids.data != prompt_ids:
        raise _malformed(trajectory, f"prompt_ids are not the leased ones ({num_prompt} ids against {len(prompt_ids) // 4} ids); prompts travel unchanged")
    room = None if max_new_tokens is None else max_new_tokens + (num_prompt if prompt_ids is None else len(prompt_ids) // 4)
    finish_reason = trajectory.finish_reason
    if trajectory.unusable_reason and not trajectory.completion_ids.data:
        return _failed_early(trajectory, num_prompt)
    counted = _counted(trajectory, trajectory, vocabulary)
    if finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        raise _malformed(trajectory, "finish_reason is not set")
    num_tokens, num_trained, is_finite, spans = counted.num_tokens, counted.num_trained, counted.is_finite, counted.spans
    overlong = room is not None and num_prompt + num_tokens > room
    for strand in trajectory.more_strands:
        own_prompt, counted = _prompt(trajectory, strand, vocabulary), _counted(trajectory, strand, vocabulary)
        overlong = overlong or (room is not None and own_prompt + counted.num_tokens > room)
        num_prompt, num_tokens, num_trained = num_prompt + own_prompt, num_tokens + counted.num_tokens, num_trained + counted.num_trained
        is_finite, spans = is_finite and counted.is_finite, spans + counted.spans
    if trajectory.turns:
        _check_turns(trajectory)
    outcome = trajectory.reward
    reward = _reward(outcome)
    return SampleFacts(
        reward=reward,
        unusable_reason=_too_large(trajectory, overlong) or _unusable(trajectory, reward, is_finite, num_trained),
        num_prompt_tokens=num_prompt,
        num_completion_tokens=num_tokens,
        num_trained_tokens=num_trained,
        spans=spans,
        truncated=finish_reason == pb.FINISH_REASON_LENGTH,
        reward_parts=dict(outcome.score.parts),
        replica_id=trajectory.replica_id,
        num_strands=1 + len(trajectory.more_strands),
        num_turns=len(trajectory.turns) or 1,
    )


def _failed_early(trajectory: pb.Trajectory, num_prompt: int) -> SampleFacts:
    """Of a sample that failed before its first token."""
    if trajectory.more_strands or trajectory.turns or trajectory.spans or trajectory.logprobs.data:
        raise _malformed(trajectory, f"it failed ({trajectory.unusable_reason}) and has no completion_ids, but log-probs, spans, turns or more strands")
    return SampleFacts(
        reward=_reward(trajectory.reward), unusable_reason=trajectory.unusable_reason, num_prompt_tokens=num_prompt, num_completion_tokens=0, num_trained_tokens=0,
        spans=(), replica_id=trajectory.replica_id, num_turns=0,
    )  # fmt: skip


def _too_large(trajectory: pb.Trajectory, overlong: bool) -> str:
    return "too_many_strands" if len(trajectory.more_strands) >= MAX_STRANDS else "overlong" if overlong else ""


def _prompt(trajectory: pb.Trajectory, words: _Words, vocabulary: int | None) -> int:
    """Number of prompt ids. vocabulary: ids must lie below it; None: they are compared with the leased ones."""
    prompt = words.prompt_ids
    if prompt.dtype != pb.PACKED_DTYPE_INT32 or not prompt.data:
        raise _malformed(trajectory, "prompt_ids must be int32 and not empty")
    if vocabulary is not None and _largest(_array(trajectory, words, "prompt_ids", pb.PACKED_DTYPE_INT32).view(_UINT32)) >= vocabulary:
        raise _malformed(trajectory, f"prompt_ids must lie in [0, {vocabulary})")
    return len(prompt.data) // 4


def _counted(trajectory: pb.Trajectory, words: _Words, vocabulary: int) -> _Counted:
    ids = _array(trajectory, words, "completion_ids", pb.PACKED_DTYPE_INT32)
    num_tokens = len(ids)
    if not num_tokens or _largest(ids.view(_UINT32)) >= vocabulary:  # a negative id is a large one
        raise _malformed(trajectory, f"completion_ids must be at least one id in [0, {vocabulary}), got {num_tokens} ids")
    logprobs = _array(trajectory, words, "logprobs", pb.PACKED_DTYPE_FLOAT32, num_tokens)
    mask = _mask(trajectory, words, num_tokens)
    return _Counted(
        num_tokens=num_tokens, num_trained=num_tokens if mask is None else int(mask.sum()), is_finite=_all_finite(logprobs), spans=_spans(trajectory, words, mask, num_tokens)
    )  # fmt: skip


def _check_turns(trajectory: pb.Trajectory) -> None:
    """Raises ValueError for a turn that lies in no strand, or a reward that is not finite."""
    parts: list[_Words] = [trajectory, *trajectory.more_strands]
    lengths = [len(words.completion_ids.data) // 4 for words in parts]
    for turn in trajectory.turns:
        if turn.strand >= len(lengths) or not turn.start < turn.end <= lengths[turn.strand]:
            raise _malformed(trajectory, f"a turn over [{turn.start}, {turn.end}) of strand {turn.strand}, but strands have {lengths} tokens")
        if turn.HasField("reward") and not math.isfinite(turn.reward):
            raise _malformed(trajectory, f"the turn at {turn.start} of strand {turn.strand} has the reward {turn.reward}; a turn without a finite one has none")


def _malformed(trajectory: pb.Trajectory, rule: str) -> ValueError:
    return ValueError(f"sample ({trajectory.group_id}, {trajectory.sample_index}): {rule}")


def with_fallback(trajectory: pb.Trajectory, value: float) -> str:
    """Gives an unscored sample the configured reward, with the reason as its one part. Returns that reason; empty: it has a score."""
    if _reward(trajectory.reward) is not None:
        return ""
    reason = unscored_reason(trajectory.reward)
    trajectory.reward.score.CopyFrom(pb.Score(value=value, parts={reason: 1.0}))
    return reason


def unscored_reason(reward: pb.Reward) -> str:
    """For instance "unscored_timeout"."""
    return f"unscored_{pb.UnscoredReason.Name(reward.unscored.reason).removeprefix('UNSCORED_REASON_').lower()}"


def _array(trajectory: pb.Trajectory, words: _Words, name: str, dtype: int, length: int | None = None) -> Any:
    packed = getattr(words, name)
    if packed.dtype != dtype:
        raise _malformed(trajectory, f"{name}: dtype is {packed.dtype}, must be {dtype} (PackedDtype)")
    try:
        values = unpack(packed)
    except ValueError as error:
        raise _malformed(trajectory, f"{name}: {error}") from None
    if length is not None and len(values) != length:
        raise _malformed(trajectory, f"{name}: {len(values)} values for {length} completion tokens; the lengths must be equal")
    return values


def _largest(values: npt.NDArray[np.uint32]) -> int:
    """As max(), in a quarter of the time for a few thousand."""
    return int(values[values.argmax()])


def _reward(outcome: pb.Reward) -> float | None:
    """The finite score, or None."""
    if not outcome.HasField("score"):
        return None
    value = outcome.score.value
    return value if math.isfinite(value) else None


def _unusable(trajectory: pb.Trajectory, reward: float | None, finite_logprobs: bool, num_trained: int) -> str:
    if trajectory.unusable_reason:
        return trajectory.unusable_reason
    if not finite_logprobs:
        return "non_finite_logprob"
    if trajectory.finish_reason == pb.FINISH_REASON_ABORT:
        return "aborted"
    if not num_trained:
        return "nothing_to_train"
    if reward is None:
        return unscored_reason(trajectory.reward)
    return ""


def _all_finite(values: npt.NDArray[np.float32]) -> bool:
    """The sum of squares is finite only if every value is; where it overflows, each is looked at."""
    return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())


def _mask(trajectory: pb.Trajectory, words: _Words, num_tokens: int) -> npt.NDArray[np.uint8] | None:
    """Zeros and ones, [num_tokens]; None: all ones, none was sent."""
    if not words.HasField("loss_mask") or not words.loss_mask.data:
        return None
    mask = _array(trajectory, words, "loss_mask", pb.PACKED_DTYPE_UINT8, num_tokens)
    if mask.max() > 1:
        raise _malformed(trajectory, f"loss_mask must be zeros and ones, got {int(mask.max())}")
    return mask  # type: ignore[no-any-return]


def _spans(trajectory: pb.Trajectory, words: _Words, mask: npt.NDArray[np.uint8] | None, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """(version, tokens with mask 1 that it drew) in order. Raises ValueError for a gap, an overlap or a falling version."""
    reached, newest = 0, 0
    spans = []
    for span in words.spans:
        version, start, end = span.version, span.start, span.end
        if start != reached or end <= start or version < newest:
            raise _malformed(trajectory, f"span of version {version} over [{start}, {end}) after version {newest} up to {reached}; spans must follow each other and versions must not fall")
        reached, newest = end, version
        spans.append((version, end - start if mask is None else int(mask[start:end].sum())))
    if reached != num_tokens:
        raise _malformed(trajectory, f"spans end at {reached}, the completion has {num_tokens} tokens; every token carries its version")
    return tuple(spans)
