"""Lends groups: blocks until the account has room and the replica samples from a version of this run.

    lease   consumes the account's room and the prompts, produces leases, waits for the bell (a close, a drop, a submission, a
            lapse, a replica that loaded a version), is unblocked by it or by wait_s
    watch   consumes the clock, produces ended leases, waits for a part of lapse_s
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from learner.gateway.account import Record
from learner.gateway.attendance import Attendance
from learner.gateway.books import Books
from learner.gateway.catalog import Catalog, Shelf
from learner.gateway.clock import LeaseClock
from learner.gateway.evaluation_desk import EvaluationDesk, EvaluationLoan
from learner.gateway.groups import Group
from learner.gateway.refusals import precondition
from learner.gateway.replicas import holder_of
from protos import faultpoints

logger = logging.getLogger("headrace.learner.leases")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan:
    """One lent group, as the lease message needs it. Example: group g00000003 for the second time, sample 0 is done."""

    group: Group
    lease_id: str
    least_version: int
    done: tuple[int, ...]  # sample indexes
    catalog: Catalog

    @property
    def row(self) -> int:
        return self.group.prompt_row


class LeaseDesk:
    """`groups_wanted()`: how many groups the rest of the run can still train, so that none are sampled in vain at its end.

    evaluation: asked for loans first, which it bounds itself; None: the run has none.
    """

    def __init__(
        self, books: Books, attendance: Attendance, shelf: Shelf, *, lapse_s: float, silence_s: float, groups_wanted: Callable[[], int], evaluation: EvaluationDesk | None = None
    ) -> None:
        self._evaluation = evaluation
        self._books = books
        self._attendance = attendance
        self._shelf = shelf
        self._lapse_s = lapse_s
        self._silence_s = silence_s
        self._groups_wanted = groups_wanted
        self._clock = LeaseClock(latest_lapse=books.ledger.latest_lapse(), lapse_s=lapse_s)
        attendance.lost.append(self.release)
        attendance.changed.append(books.bell.ring)

    async def lease(self, replica_id: str, incarnation: int, *, max_groups: int, wait_s: float) -> list[Loan | EvaluationLoan]:
        """At least one loan, or none once wait_s has passed. Raises Refused FAILED_PRECONDITION when the replica does not attend,
        ValueError for a wait_s that is no time."""
        if not 0 <= wait_s < math.inf:
            raise ValueError(f"wait_s={wait_s} must be finite and at least 0")
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        catalog = await self._shelf.wait(wait_s)
        while True:
            replica = self._attendance.find(replica_id, incarnation)
            if replica is None:
                raise precondition(f"replica {replica_id} (incarnation {incarnation}) does not attend; attend first, then lease")
            loans = self._grant(holder_of(replica_id, incarnation), max(1, max_groups), catalog) if catalog and replica.may_lease else []
            if loans:
                await self._settle(loans)
                return loans
            left_s = end_s - loop.time()
            if left_s <= 0 or not await self._books.bell.wait(left_s):
                return []

    def release(self, replica_id: str, incarnation: int) -> None:
        """The replica is gone: its leases are free at once. One that said goodbye has not failed at its groups."""
        replica = self._attendance.replicas.get(replica_id)
        in_good_order = replica is not None and replica.member == (replica_id, incarnation) and replica.left_in_order
        self._free(self._books.ledger.release_holder(holder_of(replica_id, incarnation), in_good_order=in_good_order))

    async def watch(self) -> None:
        """Ends leases that lapsed, for ever; and those of replicas that did not come back after this process was restarted."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            self._free(self._books.ledger.expire(self._clock.now_s()))
            if loop.time() - started_s > self._silence_s:
                self._free_absent()
            await asyncio.sleep(min(1.0, self._lapse_s / 4, self._silence_s / 4))

    def _free_absent(self) -> None:
        ledger = self._books.ledger
        present = {holder_of(*replica.member) for replica in self._attendance.attending()}
        for holder in ledger.holders() - present:
            self._free(ledger.release_holder(holder, in_good_order=False))

    def _grant(self, holder: str, max_groups: int, catalog: Catalog) -> list[Loan | EvaluationLoan]:
        """max_groups counts training groups; an evaluation's larger ones take the place of several."""
        loans: list[Loan | EvaluationLoan] = []
        left, group_size = max_groups, self._books.ledger.limits.group_size
        while left > 0:
            loan = (self._evaluation.next(holder) if self._evaluation else None) or self._next(holder, catalog)
            if loan is None:
                break
            loans.append(loan)
            left -= max(1, math.ceil(loan.group_size / group_size)) if isinstance(loan, EvaluationLoan) else 1
        return loans

    def _next(self, holder: str, catalog: Catalog) -> Loan | None:
        """Lends one group: those that were lent before first."""
        ledger, now = self._books.ledger, self._clock.now_s()
        lease_id = uuid.uuid4().hex
        record: Record
        if ledger.next_release() is not None:
            group, record = ledger.lease_again(holder=holder, lease_id=lease_id, lapse_at=now + self._lapse_s)
            self._books.progress["samples"] += len(group.parts)
            self._books.progress["tokens"] += sum(part.end for part in group.parts.values())
        else:
            if not ledger.room() or ledger.counts().open >= self._groups_wanted():
                return None
            pick = catalog.picker.next(ledger.account.history, ledger.step)
            if pick is None:
                return None
            group, record = ledger.open_group(
                holder=holder, lease_id=lease_id, now=now, lapse_at=now + self._lapse_s, prompt_id=catalog.prompts[pick.row].prompt_id,
                prompt_row=pick.row, data_set=pick.data_set, pick=pick.note,
            )  # fmt: skip
        self._books.commit(record)
        assert ledger.published is not None
        return Loan(group=group, lease_id=lease_id, least_version=ledger.published.number, done=tuple(sorted(group.samples)), catalog=catalog)

    async def _settle(self, loans: list[Loan | EvaluationLoan]) -> None:
        """Waits for the disk. A caller that leaves meanwhile gets nothing, so its loans are free again."""
        try:
            await asyncio.shield(self._books.barrier())
        except asyncio.CancelledError:
            for loan in loans:
                if isinstance(loan, EvaluationLoan):
                    assert self._evaluation is not None
                    self._evaluation.give_back(loan.lease_id)
                else:
                    self._books.commit(self._books.ledger.release_lease(loan.lease_id, in_good_order=True))
            raise
        faultpoints.point("after_lease_before_answer")

    def _free(self, record: Record | None) -> None:
        if record is not None:
            logger.info("leases ended: %d lent again, %d dropped after too many attempts", len(record["given_back"]) + len(record["failed"]), len(record["dropped"]))
            self._books.commit(record)
