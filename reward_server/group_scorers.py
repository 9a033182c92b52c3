"""Scorers of whole groups: functions in the pool's processes, ranks, tournaments; and a scorer of single samples asked for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from google.protobuf.struct_pb2 import Struct

from reward_server import grouping
from reward_server.combined import Ask
from reward_server.outcome import Answered, Outcome, Scored, Unscored, of_each
from reward_server.pooled import Pooled
from reward_server.scorer import Answer, Group, GroupAnswer, Kind, Work

OTHER = "other"  # the record's field that a comparing scorer finds the second completion in


@runtime_checkable
class GroupScorer(Protocol):
    """Scores all samples of a prompt together. `submit_group` never blocks; its answer comes once, on the same loop, unless the owner is forgotten."""

    def submit_group(self, group: Group, answer: GroupAnswer) -> None: ...


class _Comparing:
    """What all of them say to a single sample."""

    kind: Kind = "group"

    def submit(self, work: Work, answer: Answer) -> None:
        answer(Unscored("this scorer compares the samples of a prompt: ask by ScoreGroup (a rollout server does with score_groups: true)"))


@dataclass(frozen=True, kw_only=True)
class ProcessGroupScorer(_Comparing, Pooled):
    """A function of (prompt, completions, fields) that returns a result for each completion."""

    def submit_group(self, group: Group, answer: GroupAnswer) -> None:
        def said(answered: Answered) -> None:
            answer(of_each(answered, len(group.completions)))

        self.pool.submit(scorer=self.index, owner=group.owner, prompt=group.prompt, completion=list(group.completions), fields=group.fields, answer=said)


@dataclass(frozen=True, kw_only=True)
class RankScorer(_Comparing):
    """Example: `RankScorer(of="length", ask=at_work.ask, limit_s=10.0)`"""

    of: str
    ask: Ask
    limit_s: float

    @property
    def description(self) -> str:
        return f"rank of {self.of} in the group"

    def submit_group(self, group: Group, answer: GroupAnswer) -> None:
        ask_each(partial(self.ask, self.of), group, lambda outcomes: answer(grouping.ranked(outcomes)))


@dataclass(frozen=True, kw_only=True)
class TournamentScorer(_Comparing):
    """Example: `TournamentScorer(of="better", ask=at_work.ask, limit_s=60.0, opponents=0, both_orders=True)`"""

    of: str
    ask: Ask
    limit_s: float
    opponents: int
    both_orders: bool

    @property
    def description(self) -> str:
        return f"share of comparisons by {self.of} won in the group"

    def submit_group(self, group: Group, answer: GroupAnswer) -> None:
        size = len(group.completions)
        games: dict[tuple[int, int], Outcome] = {}
        met = grouping.pairs(size, self.opponents)

        def judged(pair: tuple[int, int], outcome: Outcome) -> None:
            games[pair] = outcome
            if len(games) == len(met):
                answer(grouping.win_shares(size, games))

        if not met:
            answer(grouping.win_shares(size, {}))
        for pair in met:
            self._play(group, pair, partial(judged, pair))

    def _play(self, group: Group, pair: tuple[int, int], judged: Answer) -> None:
        """Asks once or both ways round. Equal completions are a draw that nobody needs to judge."""
        first, second = (group.completions[place] for place in pair)
        if first == second:
            judged(Scored(value=0.5))
            return
        heard: dict[bool, Outcome] = {}

        def said(is_back: bool, outcome: Outcome) -> None:
            heard[is_back] = outcome
            if len(heard) == 1 + self.both_orders:
                judged(grouping.game(heard[False], heard.get(True)))

        for is_back, (one, other) in enumerate([(first, second), (second, first)][: 1 + self.both_orders]):
            work = group.single(one)
            self.ask(self.of, replace(work, fields=_with_other(work.fields, other)), partial(said, bool(is_back)))


def ask_each(ask: Callable[[Work, Answer], None], group: Group, answer: GroupAnswer) -> None:
    """A scorer of single samples, asked for each of a group."""
    outcomes: dict[int, Outcome] = {}

    def heard(place: int, outcome: Outcome) -> None:
        outcomes[place] = outcome
        if len(outcomes) == len(group.completions):
            answer(tuple(outcomes[each] for each in range(len(outcomes))))

    for place, completion in enumerate(group.completions):
        ask(group.single(completion), partial(heard, place))


def _with_other(fields: bytes, other: str) -> bytes:
    record = Struct.FromString(fields)
    record.update({OTHER: other})
    return record.SerializeToString(deterministic=True)


