"""From what a sample and its environment said to the trajectory that is submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import struct_pb2

from protos.arrays import pack_floats, pack_ids, pack_mask
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.conversation import Conversation, Strand
from rollout_server.environments.interface import EnvironmentFailure
from rollout_server.wire import version_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A sample of several turns that is over.

    Example: Played(conversation=c, environment="calculator", is_cut=False, messages=({"role": "user", "content": "3*4"}, ...))
    """

    conversation: Conversation
    environment: str  # its name
    is_cut: bool  # at its turns or its tokens, and not ended by itself
    messages: Sequence[Mapping[str, Any]]  # all that was said, for scorers and people
    reward: float | None = None  # None: the reward server is asked
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: EnvironmentFailure | None = None
    unusable: str = ""  # why its tokens may not be trained on

    @property
    def unusable_reason(self) -> str:
        """Empty where it may be trained on."""
        if self.failure is not None:
            return f"environment_{self.failure.reason}"
        if not self.conversation.turns:
            return "environment_no_room" if self.is_cut else "environment_no_turn"
        return self.unusable

    @property
    def last_text(self) -> str:
        """The policy's last answer."""
        return next((str(message["content"]) for message in reversed(self.messages) if message["role"] == "assistant"), "")

    @property
    def text(self) -> str:
        """All of it after the first messages, for people."""
        began = next((place for place, message in enumerate(self.messages) if message["role"] == "assistant"), len(self.messages))
        return "".join(f"[{message['content']}]" if message["role"] != "assistant" else str(message["content"]) for message in self.messages[began:])


def given_reward(played: Played) -> pb.Reward | None:
    """What the environment gave, or that nothing is known; None: the reward server is to be asked."""
    if played.unusable_reason:
        words = played.failure.detail if played.failure is not None else played.unusable_reason
        return pb.Reward(unscored=pb.Unscored(reason=pb.UNSCORED_REASON_ERROR, detail=words), scorer=f"environment:{played.environment}")
    if played.reward is None:
        return None
    return pb.Reward(score=pb.Score(value=played.reward, parts=played.parts), scorer=f"environment:{played.environment}")


def trajectory_of(played: Played, *, leased_prompt: Sequence[int], **rest: Any) -> pb.Trajectory:
    """rest: fields of the trajectory that the conversation does not say (identity, reward, replica, times)."""
    strands = played.conversation.strands
    trajectory = pb.Trajectory(
        finish_reason=pb.FINISH_REASON_ABORT if played.failure or not strands else pb.FINISH_REASON_LENGTH if played.is_cut else pb.FINISH_REASON_STOP,
        unusable_reason=played.unusable_reason, text=played.text, **rest,
    )  # fmt: skip
    if not strands:
        trajectory.prompt_ids.CopyFrom(pack_ids(list(leased_prompt)))
        return trajectory
    trajectory.own_prompt = list(leased_prompt) != strands[0].prompt_ids
    trajectory.turns.extend(pb.Turn(strand=turn.strand, start=turn.start, end=turn.end, reward=turn.reward) for turn in played.conversation.turns)
    _fill(trajectory, strands[0])
    for strand in strands[1:]:
        _fill(trajectory.more_strands.add(), strand)
    return trajectory


def with_messages(fields: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
    """A record's fields and, as `messages`, all that was said: what a scorer of several turns sees."""
    made = struct_pb2.Struct()
    made.CopyFrom(fields)
    made.update({"messages": [{"role": str(message["role"]), "content": str(message.get("content") or "")} for message in messages]})
    return made


def _fill(words: pb.Trajectory | pb.Strand, strand: Strand) -> None:
    words.prompt_ids.CopyFrom(pack_ids(strand.prompt_ids))
    words.completion_ids.CopyFrom(pack_ids(strand.ids))
    words.logprobs.CopyFrom(pack_floats(strand.logprobs))
    if not all(strand.mask):
        words.loss_mask.CopyFrom(pack_mask(strand.mask))
    words.spans.extend(version_spans(strand.spans))
