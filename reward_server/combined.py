"""A scorer made of other scorers: asks what its rule needs, round by round, and answers once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from reward_server import fields
from reward_server.combining import Route, Rule, outcome_of
from reward_server.outcome import Outcome, Scored, Unscored, clean
from reward_server.scorer import Answer, Kind, Work

Ask = Callable[[str, Work, Answer], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedScorer:
    """`ask` reaches the other scorers, cache included. Example: `CombinedScorer(rule=Sum(...), ask=ask, description="...", limit_s=10.0)`"""

    rule: Rule
    ask: Ask
    description: str
    limit_s: float  # of its parts together, in the longest case
    kind: Kind = "combine"

    def submit(self, work: Work, answer: Answer) -> None:
        record = fields.decode(work.fields) if isinstance(self.rule, Route) else {}
        _Course(self, work, record, answer).go_on()


class _Course:
    """One item on its way through the rounds of its rule. One unscored part makes the whole unscored, with its reason, at once."""

    def __init__(self, scorer: CombinedScorer, work: Work, record: Mapping[str, Any], answer: Answer) -> None:
        self._scorer, self._work, self._record, self._answer = scorer, work, record, answer
        self._known: dict[str, Scored] = {}
        self._num_asked = 0
        self._is_over = False

    def go_on(self) -> None:
        said = self._scorer.rule.decide(self._known, self._record)
        if isinstance(said, Unscored):
            self._end(said)
        elif not isinstance(said, tuple):
            self._end(outcome_of(said, self._known))
        else:
            self._num_asked = len(said)  # before the first question: answers may come at once
            for name in said:
                self._scorer.ask(name, self._work, partial(self._heard, name))

    def _heard(self, name: str, outcome: Outcome) -> None:
        if self._is_over:
            return
        if isinstance(outcome, Unscored):
            self._end(Unscored(clean(f"part {name!r}: {outcome.detail}"), outcome.reason))
            return
        self._known[name] = outcome
        self._num_asked -= 1
        if not self._num_asked:
            self.go_on()

    def _end(self, outcome: Outcome) -> None:
        self._is_over = True
        self._answer(outcome)
