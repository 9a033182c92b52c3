"""Drives one replica's weight updates: orders of the learner in, calls on the engine, reports out.

    driver = UpdateDriver(engine, fetch=fetch)          # fetch(have_version) opens LearnerService.FetchWeights
    task = asyncio.create_task(driver.run())
    driver.welcome(newest_version)                      # after each handshake of Attend
    driver.order(response)                              # each AttendResponse; orders not about weights are ignored
    report = await driver.next_report()                 # UpdateReports for Attend, in order
    driver.detached()                                   # the Attend stream was lost: its epoch is over
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from protos.learner.v1alpha1 import learner_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitTimes:
    """Example: CommitTimes(pause_s=0.03)"""

    pause_s: float  # from pause to resume: nothing was drawn


class CommitError(RuntimeError):
    """The engine failed after weights were touched: what it serves is undefined until the next full update."""


class Updatable(Protocol):
    """What the driver needs of an engine. Everything before commit leaves the serving weights alone."""

    @property
    def loaded_version(self) -> int:
        """Version sampled from; 0 for the base weights."""

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        """Receives by collectives into staging and verifies (protos/weights/landing.py). Raises when it could not."""

    async def stage_chunks(self, manifest: bytes, chunks: AsyncIterator[tuple[int, int, bytes]]) -> None:
        """Receives (bucket, offset, data) into staging and verifies. Raises when it could not."""

    async def commit(self, version: int) -> CommitTimes:
        """pause < apply < flush < version < resume. Raises CommitError when weights may have been touched (then it serves
        nothing), any other error when they were not (then the old version serves)."""

    async def discard(self) -> None:
        """Gives up a running receive and frees staging; never raises for having nothing to discard."""


class UpdateDriver:
    """One replica's updates, one at a time."""

    def __init__(
        self,
        engine: Updatable,
        *,
        fetch: Callable[[int], AsyncIterator[pb.FetchWeightsResponse]],
        catch_up_s: float = 2.0,
        receive_timeout_s: float = 300.0,
    ) -> None:
        raise NotImplementedError

    @property
    def stale(self) -> bool:
        """Whether the engine serves nothing until the next full update."""
        raise NotImplementedError

    @property
    def newest_version(self) -> int:
        """Newest version heard of; 0 before the first."""
        raise NotImplementedError

    def welcome(self, newest_version: int) -> None:
        """The replica attends."""
        raise NotImplementedError

    def detached(self) -> None:
        """The Attend stream was lost."""
        raise NotImplementedError

    def order(self, response: pb.AttendResponse) -> None:
        """Takes published, prepare_update, begin_transfer and abort_update; never blocks."""
        raise NotImplementedError

    async def next_report(self) -> pb.UpdateReport:
        raise NotImplementedError

    async def run(self) -> None:
        """Until cancelled."""
        raise NotImplementedError
