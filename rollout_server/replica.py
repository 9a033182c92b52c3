"""One replica: its engine, what state it is in, and who may draw from it now.

    supervise    consumes the engine's health, produces restarts with backoff, waits for a death, unblocked by time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

from protos.rollout.v1alpha1 import rollout_pb2 as pb
from rollout_server.checkpoint import folder_update
from rollout_server.engine import Delta, Engine, EngineUnavailableError, SamplingSpec
from rollout_server.tally import Tally
from rollout_server.weights.driver import CommitError, CommitTimes, UpdateDriver

logger = logging.getLogger("headrace.rollout.replica")

CHECK_S = 0.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0


class Replica:
    """State is derived, never set: see `state`. `attends`: it belongs to a learner, so base weights are not enough;
    `max_num_seqs`: samples drawn at once."""

    def __init__(self, engine: Engine, *, attends: bool, max_num_seqs: int) -> None:
        self.engine = engine
        self.max_num_seqs = max_num_seqs
        self.attends = attends
        self.driver: UpdateDriver | None = None  # set by the membership, one for each life of the engine
        self.life = 0  # how often the engine has come up
        self.draining = False
        self.tally = Tally()
        self._up = False
        self._broken = ""  # why LoadWeights left the weights undefined
        self._down_reason = "the engine is loading"
        self._requests: set[str] = set()
        self._folder: Path | None = None  # what LoadWeights loaded last; a restarted engine gets it again
        self._loading = asyncio.Lock()

    # --- state

    @property
    def state(self) -> pb.ReplicaState:
        if not self._up:
            return pb.REPLICA_STATE_STARTING
        if self.draining:
            return pb.REPLICA_STATE_DRAINING
        if self._broken or (self.driver is not None and self.driver.stale):
            return pb.REPLICA_STATE_STALE
        if self.attends and not self.engine.loaded_version:
            return pb.REPLICA_STATE_WAITING
        return pb.REPLICA_STATE_SERVING

    @property
    def detail(self) -> str:
        """Why it does not serve, when it does not."""
        return {
            pb.REPLICA_STATE_STARTING: self._down_reason,
            pb.REPLICA_STATE_DRAINING: "the replica is draining",
            pb.REPLICA_STATE_STALE: self._broken or "an update failed after weights were touched; the next full update will mend it",
            pb.REPLICA_STATE_WAITING: "no version of the learner has been loaded yet",
        }.get(self.state, "")

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
        for request_id in left:
            await self.engine.abort(request_id)
        return len(left)

    # --- weights without a learner

    async def load_folder(self, folder: Path) -> CommitTimes:
        """Loads a Hugging Face folder as the next version. Raises ValueError when it does not hold this model."""
        async with self._loading:
            version = self.engine.loaded_version + 1
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
        self._up, self.life = True, self.life + 1

    async def supervise(self) -> None:
        """For ever: brings a dead engine up again. It comes back with the base weights, hence as version 0."""
        while True:
            await asyncio.sleep(CHECK_S)
            if not self._up:
                continue  # somebody is bringing it up already
            try:
                await self.engine.check()
            except EngineUnavailableError as error:
                await self.restart(str(error))

    async def restart(self, reason: str) -> None:
        """Returns once the engine is up again, on the base weights (or on what LoadWeights loaded last)."""
        self._up, self._down_reason = False, f"the engine is restarting: {reason}"
        wait_s = _FIRST_WAIT_S
        while True:
            logger.warning("starting the engine again: %s", reason)
            try:
                await self.engine.stop()
                await self.start()
                break
            except Exception as error:  # supervised edge: whatever kept it down is logged, and tried again later
                reason = f"{type(error).__name__}: {error}"
                self._down_reason = f"the engine does not come up: {reason}"
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self._broken = ""
        logger.warning("the engine is up again (life %d)", self.life)
        if self._folder is not None:
            await self.load_folder(self._folder)
