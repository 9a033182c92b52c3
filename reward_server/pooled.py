"""Scorers that are functions in a pool's processes: what the pool's account of them says, and one of single samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from reward_server.accounts import Account
from reward_server.outcome import Answered
from reward_server.pool import Pool
from reward_server.scorer import Answer, Kind, Work


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """A function in the pool's processes, by its place among the pool's scorers."""

    pool: Pool
    index: int

    @property
    def account(self) -> Account:
        return self.pool.accounts[self.index]

    @property
    def description(self) -> str:
        return self.account.description

    @property
    def limit_s(self) -> float:
        return self.account.spec.limit_s


@dataclass(frozen=True, kw_only=True)
class ProcessScorer(Pooled):
    """A function of single samples. Example: `ProcessScorer(pool=pool, index=0)`"""

    kind: Kind = "process"

    @property
    def version(self) -> str:
        """Digest of the file that the function is defined in."""
        return self.account.version

    @property
    def is_deterministic(self) -> bool:
        """Whether the same item gets the same score: the function says so, and all processes run the same one."""
        return self.account.is_deterministic and not self.account.has_changed

    def submit(self, work: Work, answer: Answer) -> None:
        answers = cast(Callable[[Answered], None], answer)  # of one completion there is one outcome
        self.pool.submit(scorer=self.index, owner=work.owner, prompt=work.prompt, completion=work.completion, fields=work.fields, answer=answers)
