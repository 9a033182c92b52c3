"""The actor: leases groups when the engine has room, and has each of their samples produced.

    run       consumes the engine's room, produces groups,       waits for room and for a lease,   unblocked by a sample's end
    _sample   consumes one sample's place, produces a trajectory: production.py

Bounds: samples being drawn ≤ the engine's room + one group; groups in hand ≤ `max_groups`. What has been drawn waits for
its score and its receipt without holding a place in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

import grpc

from protos import rpc
from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from rollout_server.episodes import Episodes
from rollout_server.places import Places
from rollout_server.production import PAUSE_S, Group, Production, Who
from rollout_server.replica import Replica
from rollout_server.reporting import Reporting
from rollout_server.scoring import Scoring
from rollout_server.submitting import Submitting
from rollout_server.together import GroupScoring, Rewards, Together
from rollout_server.tokens import Tokens

logger = logging.getLogger("headrace.rollout.actor")

LEASE_WAIT_S = 5.0


class Actor:
    """`who()`: current identity; None while the replica does not attend."""

    def __init__(
        self, *, stub: Any, replica: Replica, tokens: Tokens, scoring: Scoring, submitting: Submitting, reporting: Reporting, who: Callable[[], Who | None],
        group_scoring: GroupScoring | None = None, episodes: Episodes | None = None,
    ) -> None:
        self._stub = stub
        self._replica = replica
        self._scoring = scoring
        self._group_scoring = group_scoring  # None: each sample is scored by itself
        self._who = who
        self._groups: dict[str, Group] = {}
        self._places = Places()
        self._me: Who | None = None  # as whom the last lease was asked for
        self._group_size = replica.max_num_seqs  # of the newest lease; before the first, one group is taken to fill the engine
        self._production = Production(
            replica=replica, tokens=tokens, scoring=scoring, submitting=submitting, reporting=reporting, places=self._places, me=self._leased_as, episodes=episodes
        )

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    async def run(self) -> None:
        """Until cancelled: leases while there is room."""
        try:
            while True:
                who = await self._room()
                for lease in await self._lease(who):
                    self._take(lease)
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Gives up all groups in hand; the learner leases them again."""
        tasks = [task for group in self._groups.values() for task in group.tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Waits until no group is in hand."""
        while self._groups:
            await self._places.wait(1.0)

    # --- leasing

    def _num_free(self) -> int:
        running = max(self._places.num_wanted, self._replica.engine.stats().num_running)
        return self._replica.limit - running

    async def _room(self) -> Who:
        """Waits until the replica may lease and the engine has room for a group."""
        while True:
            who = self._who()
            if who is not None and self._replica.state == rollout_pb2.REPLICA_STATE_SERVING:
                max_num_seqs = self._replica.max_num_seqs
                max_groups = 4 * math.ceil(max_num_seqs / self._group_size) + 4
                fits = self._num_free() >= min(self._group_size, self._replica.limit)
                if fits and len(self._groups) < max_groups:
                    self._me = who
                    return who
            await self._places.wait(PAUSE_S)

    def _leased_as(self) -> Who:
        assert self._me is not None, "a group in hand was leased as somebody"
        return self._me

    async def _lease(self, who: Who) -> list[learner_pb2.Lease]:
        request = learner_pb2.LeaseGroupsRequest(
            replica_id=who.replica_id, incarnation=who.incarnation, wait_s=LEASE_WAIT_S,
            max_groups=max(1, self._num_free() // self._group_size),
        )  # fmt: skip
        try:
            response = await self._stub.LeaseGroups(request, timeout=rpc.deadline_s("LeaseGroups"))
        except grpc.aio.AioRpcError as error:
            logger.info("no lease: %s %s", error.code().name, error.details())
            await asyncio.sleep(PAUSE_S)
            return []
        return list(response.leases)

    def _take(self, lease: learner_pb2.Lease) -> None:
        if lease.purpose != learner_pb2.LEASE_PURPOSE_EVALUATION:  # rooms are counted in training groups
            self._group_size = self._replica.want = max(1, lease.group_size)
        group = self._groups.get(lease.group_id)
        if group is None:
            group = self._groups[lease.group_id] = Group(lease=lease, together=self._together(lease))
        group.lease = lease
        for index in range(lease.group_size):
            if index not in lease.done and index not in group.tasks:
                task = group.tasks[index] = asyncio.create_task(self._sample(group, index))
                self._places.want((lease.group_id, index))
                task.add_done_callback(lambda _, index=index: self._ended(group, index))  # type: ignore[misc]
        self._leave_if_done(group)

    def _together(self, lease: learner_pb2.Lease) -> Together | None:
        client = self._group_scoring
        if client is None:
            return None

        async def score(completions: list[str]) -> Rewards:
            with self._replica.tally.scoring.of(len(completions)):
                return await client.score(scorer=self._scoring.scorer, prompt=lease.prompt_text, completions=completions, fields=lease.fields)

        return Together(lease.group_size, done=lease.done, score=score)

    def _ended(self, group: Group, index: int) -> None:
        if group.together is not None:
            group.together.ended(index)
        self._places.leave((group.lease.group_id, index))
        self._leave_if_done(group)

    def _leave_if_done(self, group: Group) -> None:
        if all(task.done() for task in group.tasks.values()) and self._groups.get(group.lease.group_id) is group:
            del self._groups[group.lease.group_id]
        self._places.ring()

    # --- one sample

    async def _sample(self, group: Group, index: int) -> None:
        """From lease to receipt. Its failures are its own: the learner leases the group again when the lease lapses."""
        try:
            await self._production.produce(group, index)
        except asyncio.CancelledError:
            raise
        except Exception:  # supervised edge: one sample must not take the others along
            logger.exception("sample (%s, %d) failed", group.lease.group_id, index)
