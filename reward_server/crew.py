"""A pool's processes that have loaded the scorers: which are idle, which are at work, and what may go to which now.

It waits for nothing and answers nobody: the pool asks it before each dispatch, and tells it what a process turns to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from reward_server import rules
from reward_server.accounts import Account, Limits, Told
from reward_server.lanes import Item
from reward_server.process import ScorerProcess

log = logging.getLogger("headrace.reward_server.pool")


class Crew:
    """Example: `crew = Crew(accounts, limits); crew.arrived(process, told); crew.room(head, num_queued=3)`"""

    def __init__(self, accounts: Sequence[Account], limits: Limits) -> None:
        self.accounts = accounts
        self.limits = limits
        self.idle: list[ScorerProcess] = []
        self.busy: set[ScorerProcess] = set()

    @property
    def num_wanted(self) -> int:
        """Processes that there should be: workers, slow ones, spares."""
        return self.limits.workers + self.limits.spares + sum(account.num_slow for account in self.accounts)

    def arrived(self, process: ScorerProcess, told: Sequence[Told]) -> None:
        """A process has loaded the scorers, and says what they are."""
        for account, said in zip(self.accounts, told, strict=True):
            if account.version and said.version != account.version and not account.has_changed:
                account.has_changed = True
                log.warning("scorer %s: its file has changed since it was loaded, and process %d runs the changed one; its scores are no longer cached. SIGHUP makes all run it", account.spec.name, process.pid)
            account.description, account.is_async = said.description, said.is_async
            account.version, account.is_deterministic = said.version, said.is_deterministic
        self.idle.append(process)

    def begin(self, batch: list[Item]) -> ScorerProcess:
        """An idle process turns to a batch."""
        process = self.idle.pop()
        process.is_slow = False
        self.accounts[batch[0].scorer].num_busy += 1
        self.busy.add(process)
        process.run(batch[0].scorer, batch)
        return process

    def leave(self, process: ScorerProcess) -> None:
        """Takes a process out of the busy ones and updates its scorer's account."""
        self.busy.discard(process)
        took_s = min(asyncio.get_running_loop().time() - process.batch_at_s, self.limits.patience_s) / process.batch_items
        self.accounts[process.scorer].leave(was_slow=process.is_slow, took_s=took_s)

    def room(self, head: Item, *, num_queued: int) -> int:
        """Calls that may go now from the lane that begins with `head`; 0: none."""
        account = self.accounts[head.scorer]
        process = self.joinable(head)
        if process is not None:
            return rules.MAX_TOGETHER - len(process.unanswered)
        if not self.idle or sum(each.num_busy for each in self.accounts) >= self.limits.workers:
            return 0
        if not rules.may_start(num_busy=account.num_busy, num_slow=account.num_slow, max_slow=max(self.limits.max_slow, self.limits.workers)):
            return 0
        return rules.batch_items(is_async=account.is_async, blocks=_blocks(account), pace_s=account.pace_s, num_queued=num_queued, num_workers=self.limits.workers)

    def joinable(self, head: Item) -> ScorerProcess | None:
        """A process that runs calls of the same async scorer and has room for more."""
        account = self.accounts[head.scorer]
        if head.alone or not account.is_async or _blocks(account):
            return None
        return next((process for process in self.busy if process.scorer == head.scorer and _has_room(process)), None)


def all_gone(process: ScorerProcess, is_async: bool) -> bool:
    """Whether nobody waits for what is running: the first call of a sync scorer, every one of an async scorer's."""
    items = list(process.unanswered.values())
    return all(item.gone for item in (items if is_async else items[:1]))


def _blocks(account: Account) -> bool:
    return asyncio.get_running_loop().time() < account.blocked_until_s


def _has_room(process: ScorerProcess) -> bool:
    """Whether an async scorer's process may take more calls: it works, is not full, and does not try one alone."""
    if process.is_dead or not 0 < len(process.unanswered) < rules.MAX_TOGETHER:
        return False
    return not next(iter(process.unanswered.values())).alone
