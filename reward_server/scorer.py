"""What all kinds of scorers have in common, and what is counted of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from reward_server.outcome import Outcome, Reason, Unscored

Kind = Literal["process", "http", "grpc", "combine", "judge", "group"]
Answer = Callable[[Outcome], None]
GroupAnswer = Callable[[tuple[Outcome, ...]], None]  # one for each sample, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One item to be scored.

    Example: `Work(owner=stream, prompt="1 + 1?", completion="2", fields=b"", priority=0)`
    """

    owner: Hashable  # whom it is for; forgotten together
    prompt: str
    completion: str
    fields: bytes  # serialized Struct
    priority: int = 0  # the higher goes first where calls wait for a remote scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one prompt, to be scored together.

    Example: `Group(owner=call, prompt="1 + 1?", completions=("2", "3"), fields=b"")`
    """

    owner: Hashable
    prompt: str
    completions: tuple[str, ...]  # at least one
    fields: bytes  # serialized Struct
    priority: int = 0

    def single(self, completion: str) -> Work:
        """One sample by itself."""
        return Work(owner=self.owner, prompt=self.prompt, completion=completion, fields=self.fields, priority=self.priority)


class Scorer(Protocol):
    """A configured scorer of any kind. `submit` never blocks; its answer comes once, on the same loop, unless the owner is forgotten."""

    @property
    def kind(self) -> Kind: ...

    @property
    def description(self) -> str: ...

    @property
    def limit_s(self) -> float:
        """Wall-clock limit of one call."""

    def submit(self, work: Work, answer: Answer) -> None: ...


@dataclass(kw_only=True, slots=True)
class Tally:
    """Answers that somebody got from one scorer since the server started; it outlives a reload."""

    num_answered: int = 0  # unscored and cached ones included
    num_cached: int = 0
    unscored: Counter[Reason] = field(default_factory=Counter)

    def count(self, outcome: Outcome) -> None:
        self.num_answered += 1
        if isinstance(outcome, Unscored):
            self.unscored[outcome.reason] += 1

    def count_cached(self) -> None:
        """An answer that came from memory."""
        self.num_answered += 1
        self.num_cached += 1
