"""One replica: its engine, what state it is in, and who may draw from it now.

    supervise    consumes the engine's health and its tokens, produces restarts with backoff, waits for a death or a stall, unblocked by time

A restarted engine has the base weights. Where it served others before, the replica is STALE until it has a version again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from protos.rollout.v1alpha1 import rollout_pb2 as pb
from rollout_server.checkpoint import folder_update
from rollout_server.concurrency import Load, Window, adjust
from rollout_server.engine import Delta, Engine, EngineStats, EngineUnavailableError, SamplingSpec
from rollout_server.stall import Rate, Stall
from rollout_server.tally import Tally
from rollout_server.weights.driver import CommitError, CommitTimes, UpdateDriver

logger = logging.getLogger("headrace.rollout.replica")

CHECK_S = 0.5
BEHIND_S = 120.0  # a replica that has been behind the newest version for longer is not ready
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_LONG_LIFE_S = 60.0  # an engine that lived so long is restarted at once when it dies
_ABORT_S = 5.0  # for a drain to tell the engine of requests that are over


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """Counts at the last look."""

    num_preempted: int = 0
    num_ended: int = 0
    num_loaded: int = 0
    was_updating: bool = False


class Replica:
    """State is derived, never set: see `state`. `attends`: it belongs to a learner, so base weights are not enough;
    `max_num_seqs`: samples drawn at once; `stall_s`: without a token for so long while requests run, the engine is wedged;
    `adapts`: the number of samples at once follows what the engine tells (concurrency.py)."""

    def __init__(self, engine: Engine, *, attends: bool, max_num_seqs: int, stall_s: float = math.inf, adapts: bool = False) -> None:
        self.engine = engine
        self.window = Window.first(most=max_num_seqs) if adapts else Window.fixed(max_num_seqs)
        self.want = 1  # samples that come together: those of a group, said by the actor
        self._seen = _Seen()
        self._stall_s = stall_s
        self._stall = Stall()
        self.rate = Rate()
        self.max_num_seqs = max_num_seqs
        self.attends = attends
        self.driver: UpdateDriver | None = None  # set by the membership, one for each life of the engine
        self.life = 0  # how often the engine has come up
        self.draining = False
        self.tally = Tally()
        self._in_doubt = asyncio.Event()  # a request found the engine unavailable
        self._up = False
        self._broken = ""  # why LoadWeights left the weights undefined
        self._down_reason = "the engine is loading"
        self._requests: set[str] = set()
        self._folder: Path | None = None  # what LoadWeights loaded last; a restarted engine gets it again
        self._lost_version = 0  # what an earlier life of the engine served, and this one does not yet
        self._current_s = 0.0  # when the newest version was last seen to be loaded
        self._up_s = 0.0  # when the engine came up
        self._wait_s = _FIRST_WAIT_S  # before the next restart
        self._loading = asyncio.Lock()

    # --- state

    @property
    def state(self) -> pb.ReplicaState:
        if not self._up:
            return pb.REPLICA_STATE_STARTING
        if self.draining:
            return pb.REPLICA_STATE_DRAINING
        if self._broken or (self.driver is not None and self.driver.stale) or self._lost:
            return pb.REPLICA_STATE_STALE
        if self.attends and not self.engine.loaded_version:
            return pb.REPLICA_STATE_WAITING
        return pb.REPLICA_STATE_SERVING

    @property
    def _lost(self) -> bool:
        """Whether the engine came up anew and has not got back what it served."""
        return self._lost_version > 0 and not self.engine.loaded_version

    @property
    def ready(self) -> bool:
        """Serves a current version: in a run, one of the learner's that has not been behind the newest for more than BEHIND_S."""
        return self.state == pb.REPLICA_STATE_SERVING and time.monotonic() - self._current_s <= BEHIND_S

    def _look(self, now_s: float) -> None:
        """Notes what can only be seen over time."""
        newest = self.driver.newest_version if self.driver is not None else 0
        if self.engine.loaded_version >= newest:
            self._current_s = now_s
        stats = self.engine.stats()
        self.rate.look(now_s, stats.num_tokens if stats.num_drawn is None else stats.num_drawn)
        self._adjust(stats)

    @property
    def limit(self) -> int:
        """Samples that the engine is given at once."""
        return int(self.window.limit)

    def _adjust(self, stats: EngineStats) -> None:
        """Where the engine tells. A look at or right after an update shows its own preemptions, and is left out."""
        if stats.num_waiting is None or stats.kv_use is None or stats.num_preempted is None:
            return
        before, num_ended = self._seen, self.tally.ends["stop"] + self.tally.ends["length"]
        updating = self._updating or self.tally.num_loaded != before.num_loaded
        self._seen = _Seen(num_preempted=stats.num_preempted, num_ended=num_ended, num_loaded=self.tally.num_loaded, was_updating=updating)
        if updating or before.was_updating:
            return
        self.window = adjust(self.window, Load(
            num_running=stats.num_running, num_waiting=stats.num_waiting, kv_use=stats.kv_use, want=self.want,
            num_preempted=max(0, stats.num_preempted - before.num_preempted), num_ended=num_ended - before.num_ended,
        ))  # fmt: skip

    @property
    def _updating(self) -> bool:
        """Whether weights are being put in place, so that nothing is drawn."""
        return self._loading.locked() or (self.driver is not None and self.driver.committing)

    @property
    def detail(self) -> str:
        """Why it does not serve, when it does not."""
        return {
            pb.REPLICA_STATE_STARTING: self._down_reason,
            pb.REPLICA_STATE_DRAINING: "the replica is draining",
            pb.REPLICA_STATE_STALE: self._broken or self._stale_words(),
            pb.REPLICA_STATE_WAITING: "no version of the learner has been loaded yet",
        }.get(self.state, "")

    def _stale_words(self) -> str:
        if self._lost:
            return f"the engine was restarted and has lost version {self._lost_version}; it serves again once a version is loaded"
        return "an update failed after weights were touched; the next full update will mend it"

    @property
    def num_running(self) -> int:
        return len(self._requests)

    # --- drawing

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSpec, request_id: str, *, stream: bool = True
    ) -> AsyncGenerator[Delta, None]:
        """As Engine.generate; EngineUnavailableError also for a replica that serves nothing now."""
        if self.state not in (pb.REPLICA_STATE_SERVING, pb.REPLICA_STATE_WAITING):
            raise EngineUnavailableError(self.detail)
        self._requests.add(request_id)
        end = "cancelled"
        try:
            async with aclosing(self.engine.generate(prompt_ids, sampling, request_id, stream=stream)) as deltas:
                async for delta in deltas:
                    end = delta.finish or end
                    yield delta
        except ValueError:
            end = "refused"
            raise
        except EngineUnavailableError:
            end = "failed"
            self._in_doubt.set()
            raise
        except Exception:
            end = "failed"
            raise
        finally:
            self._requests.discard(request_id)
            self.tally.ends[end] += 1

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests, waits for running ones up to grace_s, then aborts the rest; returns how many."""
        self.draining = True
        end_s = asyncio.get_running_loop().time() + grace_s
        while self._requests and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)
        left = list(self._requests)
        with suppress(TimeoutError):  # a wedged engine does not hold up the drain: its processes are ended soon after
            async with asyncio.timeout(_ABORT_S):
                for request_id in left:
                    await self.engine.abort(request_id)
        return len(left)

    # --- weights without a learner

    async def load_folder(self, folder: Path) -> CommitTimes:
        """Loads a Hugging Face folder as the next version. Raises ValueError when it does not hold this model."""
        async with self._loading:
            version = max(self.engine.loaded_version, self._lost_version) + 1
            manifest, chunks = await asyncio.to_thread(folder_update, folder, version)

            async def stream() -> AsyncIterator[tuple[int, int, bytes]]:
                for chunk in chunks:
                    yield chunk

            try:
                await self.engine.stage_chunks(manifest.SerializeToString(), stream())
            except RuntimeError as error:
                raise ValueError(f"{folder}: {error}") from error
            try:
                times = await self.engine.commit(version)
            except CommitError as error:
                self._broken = str(error)
                raise
            self._broken, self._folder = "", folder
            self.tally.updated(times.pieces_s)
            return times

    # --- life

    async def start(self) -> None:
        await self.engine.start()
        self._up, self.life, self._up_s = True, self.life + 1, time.monotonic()
        self._stall, self._current_s = Stall(), self._up_s

    async def supervise(self) -> None:
        """For ever: brings a dead or wedged engine up again. It comes back with the base weights, hence as version 0."""
        while True:
            await self._until_in_doubt()
            if not self._up:
                continue  # somebody is bringing it up already
            self._look(time.monotonic())
            try:
                await self.engine.check()
            except EngineUnavailableError as error:
                self.tally.engine_ends["died"] += 1
                await self.restart(str(error))
            else:
                await self._end_a_stall()

    async def _until_in_doubt(self) -> None:
        """The time between two looks, or until a request has found the engine dead."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._in_doubt.wait(), CHECK_S)
        self._in_doubt.clear()

    async def _end_a_stall(self) -> None:
        """A wedged engine lives and answers; only its tokens do not come. An update has a deadline of its own."""
        stats = self.engine.stats()
        num_drawn = stats.num_tokens if stats.num_drawn is None else stats.num_drawn
        for_s = self._stall.seconds(time.monotonic(), num_running=stats.num_running, num_drawn=num_drawn, paused=self._updating)
        if for_s > self._stall_s:
            self.tally.engine_ends["stalled"] += 1
            await self.restart(f"it has drawn nothing for {for_s:.1f} s while {stats.num_running} requests ran (stall_s={self._stall_s:g})")

    async def restart(self, reason: str, *, keeps: bool = True) -> None:
        """Returns once the engine is up again, on the base weights (or on what LoadWeights loaded last). With `keeps` it serves nothing
        until it has a version again, where it had one."""
        self._up, self._down_reason = False, f"the engine is restarting: {reason}"
        self._lost_version = max(self._lost_version, self.engine.loaded_version) if keeps else 0
        lived_long = time.monotonic() - self._up_s > _LONG_LIFE_S
        self._wait_s = _FIRST_WAIT_S if lived_long else min(2 * self._wait_s, _LONGEST_WAIT_S)
        await self._stopped()
        if not lived_long:
            await asyncio.sleep(self._wait_s)
        while not await self._started(reason):
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._broken = ""
        logger.warning("the engine is up again (life %d)", self.life)
        if self._folder is not None:
            await self._load_again(self._folder)

    async def _stopped(self) -> None:
        """At once, so that whoever waits for a token hears of it."""
        try:
            await self.engine.stop()
        except Exception:  # supervised edge: what cannot be stopped in order is gone or will be left
            logger.exception("stopping the engine")

    async def _started(self, reason: str) -> bool:
        logger.warning("starting the engine again: %s", reason)
        try:
            await self.engine.stop()
            await self.start()
        except Exception as error:  # supervised edge: whatever kept it down is logged, and tried again later
            self._down_reason = f"the engine does not come up: {type(error).__name__}: {error}"
            logger.warning("%s", self._down_reason)
            return False
        return True

    async def _load_again(self, folder: Path) -> None:
        """What LoadWeights had loaded. Where it cannot be read any more the replica stays STALE and says why."""
        try:
            await self.load_folder(folder)
        except (ValueError, CommitError, EngineUnavailableError, OSError) as error:
            self._broken = f"the engine was restarted, and {folder} could not be loaded again: {error}; load weights again"
            logger.error("%s", self._broken)
