"""Turns a finished save into a cut, one at a time, and lets the journal forget what no cut needs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from learner.config import CheckpointConfig, JournalConfig
from learner.gateway import cuts
from learner.gateway.appends import Key
from learner.gateway.best import best_step
from learner.gateway.books import Books
from learner.gateway.recovery import Capture
from learner.gateway.refusals import Refused, precondition
from learner.gateway.segments import JournalDamaged, Position

logger = logging.getLogger("headrace.learner.saving")
RETRY_S = 5.0  # between two attempts at a cut that a full journal needs
UNHEARD_S = 1200.0  # beyond a save's own limits, for its end to be reported
CHECK_S = 0.5  # between two looks at how full the journal is


@dataclass(frozen=True, kw_only=True, slots=True)
class _Announced:
    capture: Capture
    position: Position  # of the record that the account was copied after
    payloads: dict[Key, Position]
    since_s: float  # of time.monotonic


class Saving:
    """Captures wait here from the publication that announced a save until the save is finished or has failed.

    lock: held while a cut is being written, so that no rollback picks the cut before it. num_failed: saves that did not become cuts.
    alarm: why training waits for a cut; empty while it does not.
    """

    def __init__(self, books: Books, run_dir: Path, *, run_id: str, checkpoint: CheckpointConfig, journal: JournalConfig, newest: cuts.Cut | None) -> None:
        """newest: the cut that the account was recovered from."""
        self._books = books
        self._run_dir, self._checkpoints, self._run_id = run_dir, run_dir / "checkpoints", run_id
        self._checkpoint, self._limits = checkpoint, journal
        self._announced: dict[int, _Announced] = {}
        self._newest = newest
        self._failed_s = self._checked_s = -math.inf
        self.lock = asyncio.Lock()
        self._patience_s = 3 * checkpoint.save_s + UNHEARD_S
        self._last_error = "no save was tried"
        self.num_failed = 0
        self.alarm = ""
        self.undecided: Callable[[], set[int]] = set  # policy steps whose value for keep_best is still to come: their cuts stay

    def announce(self, capture: Capture, position: Position) -> None:
        """position: of the record that announced it, which must be on the disk."""
        payloads = {key: self._books.payloads[key] for key in capture.keys if key in self._books.payloads}
        self._announced[capture.policy_step] = _Announced(capture=capture, position=position, payloads=payloads, since_s=time.monotonic())

    def clear(self) -> None:
        """A new trainer incarnation will not finish the saves of the older one."""
        self._announced.clear()

    def fail(self, policy_step: int, error: str) -> None:
        """The save failed, in the trainer or here: nothing is kept for it."""
        self._announced.pop(policy_step, None)
        self.num_failed += 1
        self._last_error = error
        self._failed_s = time.monotonic()
        logger.error("the save of step %d failed (%d so far): %s", policy_step, self.num_failed, error)
        self._books.bell.ring()

    def has_cut(self, policy_step: int) -> bool:
        """Whether the policy of a step lies in a cut."""
        return self._newest is not None and self._newest.policy_step >= policy_step

    def without_last_cut(self, policy_step: int, tries: int) -> str:
        """What is said when a run cannot end well."""
        before = f"that of step {self._newest.policy_step}" if self._newest else "none"
        return (
            f"the run is at its end, step {policy_step}, but the cut of it failed {tries} times ({self._last_error}; the newest cut is {before}): "
            f"make room or repair the disk of {self._checkpoints}, then start the same command again; what was trained since that cut is replayed from the journal"
        )

    def is_covered(self, policy_step: int) -> bool:
        """Whether the policy of a step has its cut, or a save of it runs already."""
        self._give_up_old()
        return self.has_cut(policy_step) or policy_step in self._announced

    async def wants_cut(self, policy_step: int) -> bool:
        """Whether the journal is full and a cut of this step, which is the newest, is to be made before anything else is trained.

        Looks at most every CHECK_S. A journal that is full right after a cut cannot be helped by another one.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S or self.alarm:
            self._checked_s = now_s
            self._sound(await self._fullness(policy_step))
        return bool(self.alarm)

    async def _fullness(self, policy_step: int) -> str:
        covered = self._newest.policy_step if self._newest else 0
        if self._newest is not None and covered == policy_step:
            return ""
        groups = self._books.ledger.num_uncovered(covered)
        num_bytes = await asyncio.to_thread(self._books.journal.bytes_since, self._newest.position if self._newest else None)
        limits = self._limits
        if groups < limits.max_groups and num_bytes < limits.max_bytes:
            return ""
        return (
            f"the journal is full ({groups} groups and {num_bytes} bytes since the cut of step {covered}; journal.max_groups={limits.max_groups}, max_bytes={limits.max_bytes}): "
            f"training waits for a cut; {self.num_failed} saves failed so far, see to the disk of {self._checkpoints}"
        )

    def may_try(self) -> bool:
        """Whether a cut may be asked for: no save is running, and the last failure was a while ago."""
        self._give_up_old()
        return not self._announced and time.monotonic() - self._failed_s >= RETRY_S

    def _give_up_old(self) -> None:
        """A trainer reports every save in time; where its report was lost, nobody may wait for it for ever."""
        now_s = time.monotonic()
        for policy_step, announced in list(self._announced.items()):
            if now_s - announced.since_s > self._patience_s:
                self.fail(policy_step, f"nothing was heard of it for {self._patience_s:.0f} s")

    def was_asked(self, policy_step: int) -> bool:
        return policy_step in self._announced and self._announced[policy_step].capture.asked

    async def finish(self, policy_step: int, source: Path) -> Path:
        """Where the marked cut lies. Raises Refused FAILED_PRECONDITION for a step without a capture, INTERNAL when the disk fails."""
        async with self.lock:
            folder = cuts.folder_of(self._checkpoints, policy_step)
            if await asyncio.to_thread(cuts.marked, folder) is not None:
                self._announced.pop(policy_step, None)
                return folder
            if policy_step not in self._announced:
                raise precondition(f"step {policy_step} was not closed with will_save by the trainer on duty; announce a save in CloseBatch")
            await self._write(policy_step, source, folder)
            self._announced.pop(policy_step, None)
            await self._forget()
            self._books.bell.ring()
            logger.info("cut of step %d lies in %s", policy_step, folder)
            return folder

    async def _write(self, policy_step: int, source: Path, folder: Path) -> None:
        announced = self._announced[policy_step]
        capture, position = announced.capture, announced.position
        cut = cuts.Cut(folder=folder, run_id=self._run_id, policy_step=policy_step, lineage=capture.lineage, segment=position.segment, offset=position.offset)
        try:
            await asyncio.to_thread(cuts.write, source, cut, capture.state, capture.keys, lambda key: self._books.journal.payload(announced.payloads[key]))
        except (OSError, JournalDamaged) as error:
            self.fail(policy_step, str(error))
            raise Refused(grpc.StatusCode.INTERNAL, f"the save of step {policy_step} could not be made a cut: {error}; make room or repair the disk") from error
        self._newest = cut

    async def _forget(self) -> None:
        """Retention; then the account and the journal let go of what is older than the oldest kept cut and not open any more."""
        best = await asyncio.to_thread(best_step, self._run_dir, self._checkpoint.keep_best)
        oldest = await asyncio.to_thread(cuts.retain, self._checkpoints, self._checkpoint.keep, best=best, undecided=self._undecided())
        record = self._books.ledger.cover(oldest.policy_step)
        if record is not None:
            await asyncio.shield(self._books.commit(record))
        self._books.forget_payloads()
        announced = [position for waiting in self._announced.values() for position in (waiting.position, *waiting.payloads.values())]
        before = min([oldest.position, *self._books.payloads.values(), *announced])
        await asyncio.to_thread(self._books.journal.forget, before)

    async def retain_again(self) -> None:
        """A step has its value for keep_best now: retention looks again."""
        async with self.lock:
            if self._newest is not None and self._checkpoint.keep_best is not None:
                await self._forget()

    def _undecided(self) -> set[int]:
        return self.undecided() if self._checkpoint.keep_best is not None else set()

    def _sound(self, alarm: str) -> None:
        if bool(alarm) != bool(self.alarm):
            (logger.error if alarm else logger.info)("%s", alarm or "the journal has room again: training goes on")
        self.alarm = alarm
