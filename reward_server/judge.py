"""A language model as a scorer: asked once or several times about each item, by way of an endpoint with all its limits."""

from __future__ import annotations

from dataclasses import dataclass

from reward_server.endpoints.endpoint import Endpoint
from reward_server.judging.votes import Reduce, reduced
from reward_server.outcome import Outcome
from reward_server.scorer import Answer, Kind, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeScorer:
    """Example: `JudgeScorer(endpoint=endpoint, description="...", votes=3, reduce="median", quorum=2)`"""

    endpoint: Endpoint
    description: str
    votes: int
    reduce: Reduce
    quorum: int  # votes that must succeed
    kind: Kind = "judge"

    @property
    def limit_s(self) -> float:
        return self.endpoint.policy.limit_s

    def submit(self, work: Work, answer: Answer) -> None:
        """Every vote is a call of its own: limited, tried again and counted as such."""
        outcomes: list[Outcome] = []

        def heard(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if len(outcomes) == self.votes:
                answer(reduced(outcomes, how=self.reduce, quorum=self.quorum))

        for _ in range(self.votes):
            self.endpoint.submit(owner=work.owner, prompt=work.prompt, completion=work.completion, fields=work.fields, priority=work.priority, answer=heard)
