"""The configured scorers under one roof: an item goes to the scorer it names, its outcome is counted and goes back.

      submit ──▶ memory? ──▶ under way? ──▶ shared cache? ──▶ scorer ──▶ landed: kept, and answered to all who waited
                   │ hit         │ join          │ hit
                   └─────────────┴───────────────┴──▶ answer

Everything runs on one event loop; nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from reward_server.cache.flights import Flights, Passenger
from reward_server.cache.memory import MemoryCache
from reward_server.cache.shared import SharedCache
from reward_server.group_scorers import GroupScorer, ask_each
from reward_server.outcome import Outcome, Scored, Unscored
from reward_server.scorer import Answer, Group, GroupAnswer, Scorer, Tally, Work
from reward_server.scorers_at_work import ScorersAtWork

_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Caches:
    """Where scores are kept. Example: `Caches(memory=MemoryCache(max_bytes=1 << 28))`"""

    memory: MemoryCache | None = None  # None: nothing is cached, and equal requests are computed each
    shared: SharedCache | None = None  # beside memory


class Plane:
    """Example: `plane = Plane(wiring.scorers(config, Path.cwd()), default="sums"); await plane.start(); plane.submit("sums", work, print)`"""

    def __init__(self, at_work: ScorersAtWork, *, default: str, caches: Caches | None = None) -> None:
        self.default = default
        self.caches = caches or Caches()
        self.flights = Flights()
        self.tallies: dict[str, Tally] = {}
        self._at_work = self._adopt(at_work)
        self._leaving: dict[ScorersAtWork, asyncio.Task[None]] = {}  # replaced ones that still have something to answer

    @property
    def at_work(self) -> ScorersAtWork:
        """Those that new items go to, and what they run on."""
        return self._at_work

    @property
    def scorers(self) -> Mapping[str, Scorer]:
        """Those that new items go to, by name."""
        return self._at_work.scorers

    async def start(self) -> None:
        """Returns once scorers can be called. Raises ValueError in one line when they cannot be loaded."""
        await self._at_work.start()
        if self.caches.shared is not None:
            self.caches.shared.start()

    async def replace(self, at_work: ScorersAtWork, *, default: str) -> None:
        """Returns once new items go to other scorers; the present ones answer what they have and end by themselves.

        Raises ValueError in one line when the others cannot be loaded: then nothing has changed.
        """
        try:
            await at_work.start()
        except BaseException:
            await at_work.stop(keep=self._at_work.endpoints)
            raise
        before, self._at_work, self.default = self._at_work, self._adopt(at_work), default
        self._leaving[before] = asyncio.create_task(self._let_go(before))

    async def _let_go(self, before: ScorersAtWork) -> None:
        while not before.is_idle(keep=self._at_work.endpoints):
            await asyncio.sleep(_LOOK_S)
        await before.stop(keep=self._at_work.endpoints)
        del self._leaving[before]

    async def stop(self) -> None:
        """Ends every process and call. What is unanswered stays so."""
        for before, task in list(self._leaving.items()):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await before.stop(keep=self._at_work.endpoints)
        await self._at_work.stop()
        if self.caches.shared is not None:
            await self.caches.shared.stop()

    def submit(self, name: str, work: Work, answer: Answer) -> None:
        """`answer` is called once on this loop, unless the owner is forgotten."""
        self._submit(self._at_work, name, work, answer)

    def submit_group(self, name: str, group: Group, answer: GroupAnswer) -> None:
        """As `submit`, for all samples of a prompt: one outcome for each, at once when all are there."""
        scorer = self._at_work.scorers.get(name)
        if isinstance(scorer, GroupScorer):
            scorer.submit_group(group, partial(_counted_each, self.tallies[name], answer))
        else:
            ask_each(partial(self.submit, name), group, answer)

    def forget(self, owner: Hashable) -> None:
        """Drops an owner's items and stops the work on them, unless others wait for the same."""
        for at_work in (self._at_work, *self._leaving):
            at_work.forget(owner)
        self.flights.forget(owner)

    def _adopt(self, at_work: ScorersAtWork) -> ScorersAtWork:
        """Combined scorers ask for their parts here, so that parts are cached and counted as well."""
        at_work.on_ask = partial(self._ask, at_work)
        for name in at_work.scorers:
            self.tallies.setdefault(name, Tally())
        return at_work

    def _ask(self, at_work: ScorersAtWork, name: str, work: Work, answer: Answer) -> None:
        """A part for a combined scorer: from its own generation, or from the present one when that has ended meanwhile."""
        self._submit(at_work if at_work in self._leaving else self._at_work, name, work, answer)

    def _submit(self, at_work: ScorersAtWork, name: str, work: Work, answer: Answer) -> None:
        scorer = at_work.scorers.get(name)
        if scorer is None:
            answer(Unscored(f"no scorer {name!r} here; there are {', '.join(at_work.scorers)}"))
            return
        tally, memory = self.tallies[name], self.caches.memory
        scope = at_work.scope(name) if memory is not None else None
        if memory is None or scope is None:
            scorer.submit(work, partial(_counted, tally, answer))
            return
        key = scope.key(work.prompt, work.completion, work.fields)
        found = memory.get(key)
        if found is not None:
            tally.count_cached()
            answer(found)
            return
        self.flights.board(key, Passenger(owner=work.owner, fly=partial(self._fly, at_work, scorer, key, work), answer=partial(_counted, tally, answer)))

    def _fly(self, at_work: ScorersAtWork, scorer: Scorer, key: bytes, work: Work) -> None:
        if self.caches.shared is None:
            scorer.submit(work, partial(self._landed, key))
        else:
            at_work.num_looking += 1
            self.caches.shared.get(key, partial(self._looked_up, at_work, scorer, key, work))

    def _looked_up(self, at_work: ScorersAtWork, scorer: Scorer, key: bytes, work: Work, found: Scored | None) -> None:
        at_work.num_looking -= 1
        if found is not None:
            assert self.caches.memory is not None
            self.caches.memory.put(key, found)
            self.flights.land(key, found)
        elif self.flights.flown_by(key) is work.owner:  # forgotten meanwhile: nobody waits, or another one flies
            scorer.submit(work, partial(self._landed, key))

    def _landed(self, key: bytes, outcome: Outcome) -> None:
        """Only scores are kept: what could not be scored now may be later."""
        if isinstance(outcome, Scored):
            assert self.caches.memory is not None
            self.caches.memory.put(key, outcome)
            if self.caches.shared is not None:
                self.caches.shared.put(key, outcome)
        self.flights.land(key, outcome)


def _counted_each(tally: Tally, answer: GroupAnswer, outcomes: tuple[Outcome, ...]) -> None:
    for outcome in outcomes:
        tally.count(outcome)
    answer(outcomes)


def _counted(tally: Tally, answer: Answer, outcome: Outcome) -> None:
    tally.count(outcome)
    answer(outcome)
