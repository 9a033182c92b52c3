"""The turns of one sample as strands of token ids: pure, and by ids alone.

Every answer comes with the ids that the engine saw before it. Where these begin with all that a strand holds, the strand goes on: what is
new in them is what an environment said (loss mask 0, log-prob 0), then comes the answer. Where they do not, the context was rewritten, and
a new strand begins with them as its prompt. So every drawn token is trained once, in the context it was drawn in, and nothing is encoded again.

    turn 0   [p p]           → a a        strand 0: p p | a a
    turn 1   [p p a a e]     → b b        strand 0: p p | a a e b b        mask 1 1 0 1 1
    turn 2   [p p b b e]     → c          strand 0 as before, strand 1: p p b b e | c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_server.spans import Span


@dataclass(kw_only=True, slots=True)
class Strand:
    """Ids of one context: those before the first answer in it, then answers and what lies between.

    Example: Strand(prompt_ids=[5, 6], ids=[7, 8, 9], logprobs=[-1.0, 0.0, -0.5], mask=[1, 0, 1], spans=[Span(version=3, start=0, end=3)])
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # completion, [n]
    logprobs: list[float] = field(default_factory=list)  # [n]
    mask: list[int] = field(default_factory=list)  # [n], 0 where the policy did not draw the token
    spans: list[Span] = field(default_factory=list)  # cover [0, n); what an environment said belongs to the span before it

    @property
    def newest_version(self) -> int:
        return self.spans[-1].version

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def holds(self, prompt_ids: Sequence[int]) -> int:
        """Number of first ids that this strand and `prompt_ids` have in common."""
        own = [*self.prompt_ids, *self.ids]
        shorter = min(len(own), len(prompt_ids))
        if own[:shorter] == list(prompt_ids[:shorter]):
            return shorter
        return next(place for place in range(shorter) if own[place] != prompt_ids[place])

    def add(self, said: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> None:
        """`said`: ids between the last answer and this one; spans: of the answer by itself."""
        if said:
            last = self.spans[-1]
            self.spans[-1] = Span(version=last.version, start=last.start, end=last.end + len(said))
        self.ids += said
        self.logprobs += [0.0] * len(said)
        self.mask += [0] * len(said)
        start = len(self.ids)
        for span in spans:
            before = self.spans[-1] if self.spans else None
            if before is not None and before.version == span.version:
                self.spans[-1] = Span(version=span.version, start=before.start, end=start + span.end)
            else:
                self.spans.append(Span(version=span.version, start=start + span.start, end=start + span.end))
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [1] * len(ids)


@dataclass(kw_only=True, slots=True)
class Turn:
    """One answer: completion ids [start, end) of a strand. Example: Turn(strand=0, start=0, end=2, reward=None)"""

    strand: int
    start: int
    end: int
    reward: float | None = None  # None: it was given nothing


class Conversation:
    """Example: `c = Conversation(); turn = c.answer([5, 6], ids=[7], logprobs=[-1.0], spans=(Span(version=3, start=0, end=1),)); c.reward(turn, 1.0)`"""

    def __init__(self) -> None:
        self.strands: list[Strand] = []
        self.turns: list[Turn] = []

    @property
    def num_forks(self) -> int:
        """How often the context was rewritten."""
        return max(0, len(self.strands) - 1)

    @property
    def reward_sum(self) -> float | None:
        """Of all turns; None where no turn was given anything."""
        given = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(given) if given else None

    def answer(self, prompt_ids: Sequence[int], *, ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> int:
        """Adds an answer of at least one token, drawn after `prompt_ids`; number of its turn.

        A strand whose newest version is newer than the answer's first does not go on either: versions never fall within one.
        """
        assert prompt_ids and ids and len(ids) == len(logprobs) and spans and spans[-1].end == len(ids), "a whole answer, and what came before it"
        number = self._going_on(prompt_ids, spans[0].version)
        if number is None:
            number = len(self.strands)
            self.strands.append(Strand(prompt_ids=list(prompt_ids)))
        strand = self.strands[number]
        strand.add(list(prompt_ids[strand.num_tokens :]), ids, logprobs, spans)
        self.turns.append(Turn(strand=number, start=len(strand.ids) - len(ids), end=len(strand.ids)))
        return len(self.turns) - 1

    def reward(self, turn: int, value: float) -> None:
        """Adds to what a turn was given."""
        self.turns[turn].reward = (self.turns[turn].reward or 0.0) + value

    def shared(self, prompt_ids: Sequence[int]) -> int:
        """Longest beginning of `prompt_ids`, in tokens, that any strand has too."""
        return max((strand.holds(prompt_ids) for strand in self.strands), default=0)

    def _going_on(self, prompt_ids: Sequence[int], version: int) -> int | None:
        """The longest strand that `prompt_ids` begin with; None: a new one begins."""
        fitting = [number for number, strand in enumerate(self.strands) if strand.holds(prompt_ids) == strand.num_tokens and strand.newest_version <= version]
        return max(fitting, key=lambda number: self.strands[number].num_tokens, default=None)
