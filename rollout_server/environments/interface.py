"""What an environment is: the few types that a plug-in is written against. Pure.

    class Counting:
        \"\"\"Say the number after the one you were told.\"\"\"

        async def reset(self, task: Task) -> str:
            self.number = task.seed % 10
            return f"{self.number}"

        async def step(self, action: Action) -> Step:
            self.number += 1
            right = action.text.strip() == str(self.number)
            return Step(reward=float(right), done=not right, observation=f"{self.number}")

        async def close(self) -> None: ...

Each method may also be a plain function; `close` may be missing. One instance plays one sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Reason = Literal["timeout", "error", "bad_answer", "died", "lost", "unavailable", "unknown"]
REASONS: tuple[Reason, ...] = ("timeout", "error", "bad_answer", "died", "lost", "unavailable", "unknown")
ROLES = ("system", "user", "assistant", "tool")
MAX_CHARACTERS = 1 << 20  # of one observation
Message = dict[str, str]  # role and content
Observation = str | Sequence[Message]  # a text is said by the user


class EnvironmentFailure(Exception):
    """An environment that could not play a sample: a typed absence, never a reward of 0.

    reason: timeout (no answer within its limit), error (it raised), bad_answer (it answered something else than the interface allows), died (its
    process ended), lost (its process was killed for another sample's sake), unavailable (no server or no place in time), unknown (no such environment).
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a sample is about. Example: `Task(prompt="What is 3 * 4?", fields={"answer": "12"}, seed=7)`"""

    prompt: str  # the record's prompt as text
    fields: Mapping[str, Any]  # the record's other fields
    seed: int  # distinct for each sample of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An answer of the policy. Example: `Action(text="3*4=", turn=0)`"""

    text: str  # without special tokens
    turn: int  # from 0
    cut: bool = False  # the answer ended at its length limit and not by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an action led to. Example: `Step(observation="12", reward=None)`"""

    observation: Observation = ""  # what is said next; not read where done
    reward: float | None = None  # for this turn; None: nothing. A sample's reward is the sum
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)  # named, for people


class Environment(Protocol):
    """One sample's world. Raising ends the sample as unusable, with the reason."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: Action) -> Step: ...

    async def close(self) -> None: ...


def checked_observation(value: object) -> list[Message]:
    """The messages of an observation. Raises ValueError saying what is wrong with it."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise ValueError(f"an observation is a text or a list of messages, got {type(value).__name__}")
    made = [_checked_message(message) for message in messages]
    size = sum(len(message["content"]) for message in made)
    if size > MAX_CHARACTERS:
        raise ValueError(f"an observation of {size} characters; at most {MAX_CHARACTERS} are taken")
    return made


def _checked_message(message: object) -> Message:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise ValueError(f"a message has role and content, got {str(message)[:100]!r}")
    role, content = message["role"], message["content"]
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"a message's role is one of {', '.join(ROLES)} and its content a text, got {role!r} and {type(content).__name__}")
    return {"role": role, "content": content}


def checked_step(value: object) -> Step:
    """The step with its observation as messages. Raises ValueError saying what is wrong with it."""
    if not isinstance(value, Step):
        raise ValueError(f"step answers a Step, got {type(value).__name__}")
    if not isinstance(value.done, bool):
        raise ValueError(f"done is True or False, got {value.done!r:.100}")
    parts = dict(value.parts)
    for name, part in parts.items():
        if not isinstance(name, str):
            raise ValueError(f"the name of a part is a text, got {name!r:.100}")
        checked_reward(part)
    observation = [] if value.done else checked_observation(value.observation)
    return Step(observation=observation, reward=None if value.reward is None else checked_reward(value.reward), done=value.done, parts={name: float(part) for name, part in parts.items()})


def checked_reward(value: object) -> float:
    """A finite number. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a reward is a finite number, got {value!r:.100}")
    return float(value)
