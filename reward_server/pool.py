"""The scorer processes as one pool.

      submit ──▶ lanes, one for each (stream, scorer) ──▶ dispatch ──▶ idle processes ──▶ answers ──▶ item.answer
                          ▲                                  ▲              │
                          └── put back: calls behind a slow, hung or dead one ◀── watch, every TICK_S while busy

Everything runs on one event loop and nothing here blocks: `dispatch` runs when items come and when a process becomes
idle; `watch` looks at busy processes; the crew says what may go to which; the fleet holds their number at workers + slow ones + spares.
A call that outlasts its patience leaves the workers (its process is slow), so those behind it go on elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protos.scrubbing import scrubbed
from reward_server import channel, rules
from reward_server.accounts import Account, Limits, ScorerSpec, Told
from reward_server.crew import Crew, all_gone
from reward_server.fleet import Fleet
from reward_server.lanes import Item, Lanes
from reward_server.outcome import Answered, Outcome, Unscored
from reward_server.process import ScorerProcess
from reward_server.rules import Verdict

log = logging.getLogger("headrace.reward_server.pool")

TICK_S = 0.025
DEATH_WORDS_S = 0.5  # how long a process whose socket closed may take to end by itself
BLOCKED_S = 60.0


class Pool:
    """Runs scorers in processes that can be killed.

    Example: `pool = Pool(specs, Limits(), folder=Path.cwd()); await pool.start(); pool.submit(...); await pool.stop()`
    """

    def __init__(self, scorers: Sequence[ScorerSpec], limits: Limits, *, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.accounts = [Account(spec=spec) for spec in scorers]
        self._limits = limits
        self._crew = Crew(self.accounts, limits)
        seen = scrubbed(os.environ) if environment is None else environment
        listed = [[spec.name, spec.use, spec.args, spec.limit_s] for spec in scorers]
        self._fleet = Fleet(
            hello=channel.encode([channel.SCHEMA, limits.memory_bytes, listed]),
            folder=folder,
            load_limit_s=limits.load_limit_s,
            wanted=lambda: self._crew.num_wanted,
            make=lambda: ScorerProcess(environment=seen, on_message=self._on_message, on_gone=self._on_gone),
            on_ready=self._on_ready,
            on_failure=self._on_failure,
        )
        self._lanes = Lanes()
        self._seqs = itertools.count()
        self._watching: asyncio.TimerHandle | None = None
        self._is_dispatching = False

    async def start(self) -> None:
        """Returns once one process has loaded the scorers. Raises ValueError in one line when they cannot be loaded."""
        await self._fleet.start_first()

    def submit(
        self, *, scorer: int, owner: Hashable, prompt: str, completion: str | list[str], fields: bytes, answer: Callable[[Answered], None]
    ) -> None:
        """Queues a call; `answer` is called once on this loop. Unbounded: the caller bounds what it has pending."""
        item = Item(seq=next(self._seqs), scorer=scorer, owner=owner, prompt=prompt, completion=completion, fields=fields, answer=answer)
        self._lanes.push(item)
        self._dispatch_soon()

    def forget(self, owner: Hashable) -> None:
        """Drops an owner's calls: at once, but for a running sync one, which is killed when it outlasts the patience."""
        self._lanes.drop(owner)
        for process in self._crew.busy:
            gone = [item for item in process.unanswered.values() if item.owner == owner]
            for item in gone:
                item.gone = True
            process.cancel([item.seq for item in gone])

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not len(self._lanes) and not self._crew.busy

    @property
    def num_queued(self) -> int:
        """Calls that no process has taken yet."""
        return len(self._lanes)

    @property
    def num_busy(self) -> int:
        """Processes at work."""
        return len(self._crew.busy)

    async def stop(self) -> None:
        """Kills and reaps every process. Calls still queued are not answered."""
        if self._watching is not None:
            self._watching.cancel()
        self._lanes.drain()
        await self._fleet.stop()

    def _on_ready(self, process: ScorerProcess, told: list[Told]) -> None:
        self._crew.arrived(process, told)
        self._dispatch_soon()

    def _on_failure(self, words: str) -> None:
        """A start failed; when nothing is left to run them, queued calls are answered so."""
        if self._fleet.num_ready == 0:
            for item in self._lanes.drain():
                self._conclude(item, Unscored(f"no scorer process could be started: {words}", "error"))

    # -- dispatch: consumes lanes and idle processes, produces busy ones; woken by submit and by every change of a process

    def _dispatch_soon(self) -> None:
        if not self._is_dispatching:
            self._is_dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatching = False
        while len(self._lanes) and (batch := self._lanes.take(self._room)):
            process = self._crew.joinable(batch[0])
            if process is not None:
                process.add(batch)
            else:
                self._crew.begin(batch)
        if self._crew.busy:
            self._watch_later()

    def _room(self, head: Item) -> int:
        return self._crew.room(head, num_queued=len(self._lanes))

    # -- answers: consumes messages of busy processes, produces outcomes and idle processes

    def _on_message(self, process: ScorerProcess, message: list[Any]) -> None:
        now_s = asyncio.get_running_loop().time()
        process.beat_at_s = now_s
        if not message:
            return
        outcome = channel.outcome_of(message)
        item = process.unanswered.pop(message[0], None)
        process.call_at_s = now_s
        process.elsewhere.discard(message[0])
        if item is not None:
            self._conclude(item, outcome)
        if process in self._crew.busy and not process.unanswered and not process.elsewhere:
            self._crew.leave(process)
            self._crew.idle.append(process)
            self._dispatch_soon()

    def _conclude(self, item: Item, outcome: Answered) -> None:
        if item.gone:
            return
        self.accounts[item.scorer].count(outcome)
        item.answer(outcome)

    # -- watch: every TICK_S while a process is busy

    def _watch_later(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(TICK_S, self._watch)

    def _watch(self) -> None:
        self._watching = None
        now_s = asyncio.get_running_loop().time()
        for process in list(self._crew.busy):
            self._judge(process, now_s)
        if self._crew.idle and self._fleet.surplus(now_s):
            self._fleet.retire(self._crew.idle.pop())
        if self._crew.busy or self._fleet.num_ready > self._crew.num_wanted:
            self._watch_later()

    def _judge(self, process: ScorerProcess, now_s: float) -> None:
        account = self.accounts[process.scorer]
        oldest = next(iter(process.unanswered.values()), None)
        if oldest is None:  # it had begun a call before it heard that others have it
            if now_s - process.call_at_s > self._limits.patience_s:
                self._give_up(process, None)
            return
        verdict = rules.verdict(
            is_async=account.is_async,
            num_unanswered=len(process.unanswered),
            all_gone=all_gone(process, account.is_async),
            is_slow=process.is_slow,
            running_s=now_s - (oldest.sent_at_s if account.is_async else process.call_at_s),
            occupied_s=now_s - (process.batch_at_s if account.is_async else process.call_at_s),
            silent_s=now_s - process.beat_at_s,
            limit_s=account.spec.limit_s,
            patience_s=self._limits.patience_s,
        )
        if verdict is Verdict.SLOW:
            self._set_aside(process, account)
        elif verdict is Verdict.TIMEOUT:
            log.warning("scorer %s did not answer within limit_s=%g; its process %d is killed", account.spec.name, account.spec.limit_s, process.pid)
            self._give_up(process, Unscored(f"no answer within limit_s={account.spec.limit_s:g}", "timeout"))
        elif verdict is Verdict.RETRY_ALONE:
            log.warning("scorer %s blocks its event loop; its process %d is killed and its calls go one by one for %g s", account.spec.name, process.pid, BLOCKED_S)
            account.blocked_until_s = now_s + BLOCKED_S
            self._give_up(process, None)
        elif verdict is Verdict.ABANDONED:
            self._give_up(process, Unscored("the caller is gone", "unavailable"))

    def _set_aside(self, process: ScorerProcess, account: Account) -> None:
        """The process becomes slow. Calls of a sync batch behind the running one go elsewhere."""
        process.is_slow = True
        account.turn_slow()
        others = [] if account.is_async else list(process.unanswered)[1:]
        process.cancel(others)
        process.elsewhere.update(others)
        self._put_back([process.unanswered.pop(seq) for seq in others], alone=False)
        self._fleet.keep_up()
        self._dispatch_soon()

    def _give_up(self, process: ScorerProcess, outcome: Outcome | None) -> None:
        """Kills a busy process. The running call gets `outcome`, or every call is tried alone when that is None."""
        items = list(process.unanswered.values())
        process.unanswered.clear()
        self._crew.leave(process)
        if outcome is not None and items:
            self._conclude(items.pop(0), outcome)
        self._put_back(items, alone=outcome is None)
        self._fleet.retire(process)
        self._dispatch_soon()

    def _put_back(self, items: list[Item], *, alone: bool) -> None:
        for item in items:
            item.alone = item.alone or alone
        self._lanes.push_front(item for item in items if not item.gone)

    # -- deaths: consumes closed sockets

    def _on_gone(self, process: ScorerProcess) -> None:
        """A process closed its socket by itself: the running call took it down."""
        if process.is_dead or not process.is_ready:
            return  # killed by us, or its start fails and says so
        process.is_dead = True
        if process in self._crew.busy:
            self._fleet.spawn(self._mourn(process))
        elif process in self._crew.idle:
            self._crew.idle.remove(process)
            self._fleet.retire(process)

    async def _mourn(self, process: ScorerProcess) -> None:
        """Blames the running call of a dead process with how it ended, or tries each of several async calls alone."""
        items = list(process.unanswered.values())
        account = self.accounts[process.scorer]
        retry = account.is_async and len(items) > 1
        process.unanswered = {} if retry else {item.seq: item for item in items[:1]}
        self._put_back(items if retry else items[1:], alone=retry)
        self._crew.leave(process)
        self._fleet.keep_up()
        self._dispatch_soon()
        words = await self._fleet.end(process, DEATH_WORDS_S)
        log.warning("a call of scorer %s took process %d down: %s", account.spec.name, process.pid, words)
        for item in process.unanswered.values():
            self._conclude(item, Unscored(f"{words} during the call", "error"))
