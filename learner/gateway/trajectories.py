"""What the account must know of a submitted trajectory, and whether it is well formed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.gateway.groups import SampleFacts
from protos.arrays import unpack
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb


def facts_of(trajectory: pb.Trajectory, *, prompt_ids: bytes | None, vocabulary: int, max_new_tokens: int | None = None) -> SampleFacts:
    """The facts of a well-formed trajectory; what cannot be trained on carries its reason.

    prompt_ids: the leased prompt as little-endian int32 bytes; None: nothing to compare with. max_new_tokens: what the lease allows;
    a longer completion would overrun the model or the trainer's memory, and again after each restart, since plans are replayed.
    Raises ValueError naming the rule and the values for a malformed one.
    """
    name = f"sample ({trajectory.group_id}, {trajectory.sample_index})"
    if trajectory.prompt_ids.dtype != pb.PACKED_DTYPE_INT32 or not trajectory.prompt_ids.data:
        raise ValueError(f"{name}: prompt_ids must be int32 and not empty")
    if prompt_ids is not None and trajectory.prompt_ids.data != prompt_ids:
        raise ValueError(f"{name}: prompt_ids are not the leased ones ({len(trajectory.prompt_ids.data) // 4} ids against {len(prompt_ids) // 4}); prompts travel unchanged")
    ids = _array(trajectory.completion_ids, pb.PACKED_DTYPE_INT32, f"{name}: completion_ids")
    num_tokens = len(ids)
    if not num_tokens or int(ids.view(np.uint32).max()) >= vocabulary:  # a negative id is a large one
        raise ValueError(f"{name}: completion_ids must be at least one id in [0, {vocabulary}), got {num_tokens} ids")
    logprobs = _array(trajectory.logprobs, pb.PACKED_DTYPE_FLOAT32, f"{name}: logprobs", num_tokens)
    mask = _mask(trajectory, num_tokens, name)
    num_trained = num_tokens if mask is None else int(mask.sum())
    if trajectory.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        raise ValueError(f"{name}: finish_reason is not set")
    reward = _reward(trajectory)
    return SampleFacts(
        reward=reward,
        unusable_reason="overlong" if max_new_tokens is not None and num_tokens > max_new_tokens else _unusable(trajectory, reward, _all_finite(logprobs), num_trained),
        num_prompt_tokens=len(trajectory.prompt_ids.data) // 4,
        num_completion_tokens=num_tokens,
        num_trained_tokens=num_trained,
        spans=_spans(trajectory, mask, num_tokens, name),
        truncated=trajectory.finish_reason == pb.FINISH_REASON_LENGTH,
        reward_parts=dict(trajectory.reward.score.parts),
        replica_id=trajectory.replica_id,
    )


def _array(packed: pb.PackedArray, dtype: int, what: str, length: int | None = None) -> Any:
    if packed.dtype != dtype:
        raise ValueError(f"{what}: dtype is {packed.dtype}, must be {dtype} (PackedDtype)")
    values = unpack(packed)
    if length is not None and len(values) != length:
        raise ValueError(f"{what}: {len(values)} values for {length} completion tokens; the lengths must be equal")
    return values


def _reward(trajectory: pb.Trajectory) -> float | None:
    """The finite score, or None."""
    if trajectory.reward.WhichOneof("outcome") != "score" or not math.isfinite(trajectory.reward.score.value):
        return None
    return trajectory.reward.score.value


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
        reason = pb.UnscoredReason.Name(trajectory.reward.unscored.reason).removeprefix("UNSCORED_REASON_").lower()
        return f"unscored_{reason}"
    return ""


def _all_finite(values: npt.NDArray[np.float32]) -> bool:
    """The sum of squares is finite only if every value is; where it overflows, each is looked at."""
    return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())


def _mask(trajectory: pb.Trajectory, num_tokens: int, name: str) -> npt.NDArray[np.uint8] | None:
    """Zeros and ones, [num_tokens]; None: all ones, none was sent."""
    if not trajectory.loss_mask.data:
        return None
    mask = _array(trajectory.loss_mask, pb.PACKED_DTYPE_UINT8, f"{name}: loss_mask", num_tokens)
    if mask.max() > 1:
        raise ValueError(f"{name}: loss_mask must be zeros and ones, got {int(mask.max())}")
    return mask  # type: ignore[no-any-return]


def _spans(trajectory: pb.Trajectory, mask: npt.NDArray[np.uint8] | None, num_tokens: int, name: str) -> tuple[tuple[int, int], ...]:
    """(version, tokens with mask 1 that it drew) in order. Raises ValueError for a gap, an overlap or a falling version."""
    end, newest = 0, 0
    spans = []
    for span in trajectory.spans:
        if span.start != end or span.end <= span.start or span.version < newest:
            raise ValueError(f"{name}: span of version {span.version} over [{span.start}, {span.end}) after version {newest} up to {end}; spans must follow each other and versions must not fall")
        end, newest = span.end, span.version
        spans.append((span.version, end - span.start if mask is None else int(mask[span.start : end].sum())))
    if end != num_tokens:
        raise ValueError(f"{name}: spans end at {end}, the completion has {num_tokens} tokens; every token carries its version")
    return tuple(spans)
