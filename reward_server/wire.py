"""Outcomes as they travel, and back."""

from __future__ import annotations

import math

from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from reward_server.outcome import Outcome, Reason, Scored, Unscored

_REASONS: dict[Reason, pb.UnscoredReason] = {
    "timeout": pb.UNSCORED_REASON_TIMEOUT,
    "error": pb.UNSCORED_REASON_ERROR,
    "non_finite": pb.UNSCORED_REASON_NON_FINITE,
    "unavailable": pb.UNSCORED_REASON_UNAVAILABLE,
    "refused": pb.UNSCORED_REASON_REFUSED,
    "bad_reference": pb.UNSCORED_REASON_BAD_REFERENCE,
    "overloaded": pb.UNSCORED_REASON_OVERLOADED,
    "breaker_open": pb.UNSCORED_REASON_BREAKER_OPEN,
}
_NAMES: dict[int, Reason] = {number: name for name, number in _REASONS.items()}


def to_proto(outcome: Outcome, scorer: str) -> pb.Reward:
    """The outcome as it travels."""
    if isinstance(outcome, Scored):
        return pb.Reward(score=pb.Score(value=outcome.value, parts=outcome.parts), scorer=scorer)
    return pb.Reward(unscored=pb.Unscored(reason=_REASONS[outcome.reason], detail=outcome.detail), scorer=scorer)


def from_proto(reward: pb.Reward) -> Outcome:
    """What another reward server said. A number that is not finite, or a message without an outcome, is unscored."""
    which = reward.WhichOneof("outcome")
    if which == "score":
        parts = dict(reward.score.parts)
        if all(math.isfinite(number) for number in (reward.score.value, *parts.values())):
            return Scored(value=reward.score.value, parts=parts)
        return Unscored(f"the score is {reward.score.value} with parts {parts}, not all finite", "non_finite")
    if which == "unscored":
        return Unscored(reward.unscored.detail, _NAMES.get(reward.unscored.reason, "error"))
    return Unscored("an answer without an outcome", "error")
