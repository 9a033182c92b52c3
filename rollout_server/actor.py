"""The actor: leases groups when the engine has room, samples them, has them scored, submits them.

    run       consumes the engine's room, produces groups, waits for room and for a lease,   unblocked by a sample's end
    _work     consumes one group, produces its samples,     waits for the least version,     unblocked by an update
    _sample   consumes one sample's place, produces a trajectory, waits for engine, scorer and receipt

Bounds: samples being drawn ≤ the engine's room + one group; groups in hand ≤ `max_groups`. What has been drawn waits for
its score and its receipt without holding a place in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from protos import rpc
from protos.arrays import encoded, unpack
from protos.identity import sample_seed
from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.engine import Delta, EngineUnavailableError, SamplingSpec
from rollout_server.environments.interface import Task
from rollout_server.episodes import Episodes
from rollout_server.exchange import GivenUp
from rollout_server.fields import plain
from rollout_server.leased_draw import LeasedDraw
from rollout_server.played import given_reward, trajectory_of, with_messages
from rollout_server.replica import Replica
from rollout_server.reporting import Fence, Reporting, Watched
from rollout_server.scoring import Scoring
from rollout_server.submitting import Finished, Submitting
from rollout_server.together import GroupScoring, Rewards, Together
from rollout_server.tokens import Tokens
from rollout_server.usable import unusable_reason
from rollout_server.wire import FINISH, drawing_of, sampling_spec, version_spans

logger = logging.getLogger("headrace.rollout.actor")

LEASE_WAIT_S = 5.0
_POLL_S = 0.02
_PAUSE_S = 0.2  # after a refused or failed call


@dataclass(kw_only=True, slots=True, eq=False)
class _Group:
    """A leased group in hand. A second lease of it only changes the fence."""

    lease: learner_pb2.Lease
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by sample_index
    together: Together | None = None  # None: each sample is scored by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Who:
    """As whom the actor leases and submits. Example: `Who(replica_id="a", incarnation=17, run_id="r1")`."""

    replica_id: str
    incarnation: int
    run_id: str


class Actor:
    """`who()`: current identity; None while the replica does not attend."""

    def __init__(
        self, *, stub: Any, replica: Replica, tokens: Tokens, scoring: Scoring, submitting: Submitting, reporting: Reporting, who: Callable[[], Who | None],
        group_scoring: GroupScoring | None = None, episodes: Episodes | None = None,
    ) -> None:
        self._stub = stub
        self._replica = replica
        self._tokens = tokens
        self._scoring = scoring
        self._group_scoring = group_scoring  # None: each sample is scored by itself
        self._episodes = episodes  # None: every sample is one answer
        self._submitting = submitting
        self._reporting = reporting
        self._who = who
        self._groups: dict[str, _Group] = {}
        self._drawing: set[tuple[str, int]] = set()  # samples that have or want a place in the engine
        self._num_given = 0  # of these, those that the engine has
        self._me: Who | None = None  # as whom the last lease was asked for
        self._group_size = replica.max_num_seqs  # of the newest lease; before the first, one group is taken to fill the engine
        self._changed = asyncio.Event()
        self._serial = 0

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
            await self._wait(1.0)

    # --- leasing

    def _num_free(self) -> int:
        running = max(len(self._drawing), self._replica.engine.stats().num_running)
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
            await self._wait(_PAUSE_S)

    async def _wait(self, limit_s: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), limit_s)
        except TimeoutError:
            return

    async def _lease(self, who: Who) -> list[learner_pb2.Lease]:
        request = learner_pb2.LeaseGroupsRequest(
            replica_id=who.replica_id, incarnation=who.incarnation, wait_s=LEASE_WAIT_S,
            max_groups=max(1, self._num_free() // self._group_size),
        )  # fmt: skip
        try:
            response = await self._stub.LeaseGroups(request, timeout=rpc.deadline_s("LeaseGroups"))
        except grpc.aio.AioRpcError as error:
            logger.info("no lease: %s %s", error.code().name, error.details())
            await asyncio.sleep(_PAUSE_S)
            return []
        return list(response.leases)

    def _take(self, lease: learner_pb2.Lease) -> None:
        if lease.purpose != learner_pb2.LEASE_PURPOSE_EVALUATION:  # rooms are counted in training groups
            self._group_size = self._replica.want = max(1, lease.group_size)
        group = self._groups.get(lease.group_id)
        if group is None:
            group = self._groups[lease.group_id] = _Group(lease=lease, together=self._together(lease))
        group.lease = lease
        for index in range(lease.group_size):
            if index not in lease.done and index not in group.tasks:
                task = group.tasks[index] = asyncio.create_task(self._sample(group, index))
                self._drawing.add((lease.group_id, index))
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

    def _ended(self, group: _Group, index: int) -> None:
        if group.together is not None:
            group.together.ended(index)
        self._drawing.discard((group.lease.group_id, index))
        self._leave_if_done(group)

    def _leave_if_done(self, group: _Group) -> None:
        if all(task.done() for task in group.tasks.values()) and self._groups.get(group.lease.group_id) is group:
            del self._groups[group.lease.group_id]
        self._changed.set()

    # --- one sample

    async def _sample(self, group: _Group, index: int) -> None:
        """From lease to receipt. Its failures are its own: the learner leases the group again when the lease lapses."""
        try:
            await self._produce(group, index)
        except asyncio.CancelledError:
            raise
        except Exception:  # supervised edge: one sample must not take the others along
            logger.exception("sample (%s, %d) failed", group.lease.group_id, index)

    async def _produce(self, group: _Group, index: int) -> None:
        lease = group.lease
        spec = sampling_spec(lease.sampling, seed=sample_seed(lease.sampling.seed, index), end_token=self._tokens.end_token)
        if lease.purpose != learner_pb2.LEASE_PURPOSE_EVALUATION:
            spec.check_trainable()
        if index in lease.greedy:
            spec = replace(spec, temperature=0.0, top_p=1.0, top_k=0)
        fields = plain(lease.fields)
        if self._episodes is not None and (name := self._episodes.chosen(fields)) is not None:
            await self._play(group, index, spec, name, Task(prompt=lease.prompt_text, fields=fields, seed=spec.seed))
            return
        prompt_ids = [int(token) for token in unpack(lease.prompt_ids)]
        drawing = drawing_of(next((part for part in lease.parts if part.sample_index == index), None))
        watched = self._reporting.begin(group_id=lease.group_id, sample_index=index, drawing=drawing, every_tokens=lease.report_every_tokens, fence=lambda: self._fence(group))
        try:
            await self._finish(group, index, prompt_ids, spec, watched)
        finally:
            self._reporting.end(watched)

    def _fence(self, group: _Group) -> Fence:
        assert self._me is not None, "a group in hand was leased as somebody"
        return Fence(run_id=self._me.run_id, lease_id=group.lease.lease_id)

    async def _finish(self, group: _Group, index: int, prompt_ids: list[int], spec: SamplingSpec, watched: Watched) -> None:
        """Draws what is left of a sample, has it scored, submits it."""
        lease, start_s = group.lease, time.monotonic()
        last = await self._draw(group, index, prompt_ids, spec, watched)
        self._drawing.discard((lease.group_id, index))  # its place is free; score and receipt need none
        self._changed.set()
        if last is None:
            await self._reporting.hand_back(watched)
            return
        generate_s = time.monotonic() - start_s
        text = self._tokens.text(last.token_ids)
        scored = await self._reward(group, index, text)
        if scored is None:
            return
        reward, score_s = scored
        self._replica.tally.answered(scored=not reward.HasField("unscored"))
        await self._submit(group, self._finished(lease, index, last, text=text, reward=reward, generate_s=generate_s, score_s=score_s))

    async def _play(self, group: _Group, index: int, spec: SamplingSpec, name: str, task: Task) -> None:
        """A sample of several turns. Between them it has no place in the engine."""
        assert self._episodes is not None and self._me is not None
        lease, me, start_s = group.lease, self._me, time.monotonic()
        draw = LeasedDraw(
            self._replica, spec, f"{lease.group_id}/{index}", until_loaded=lambda: self._until_loaded(group.lease.least_version),
            busy=lambda busy: self._wants_place((lease.group_id, index), busy),
        )  # fmt: skip
        self._wants_place((lease.group_id, index), False)
        leased_prompt = [int(token) for token in unpack(lease.prompt_ids)]
        room = min(len(leased_prompt) + spec.max_new_tokens, self._replica.engine.info.max_model_len)
        try:
            played = await self._episodes.play(name, task, draw=draw, room_tokens=room)
        except GivenUp:
            return
        generate_s, score_s = time.monotonic() - start_s, 0.0
        reward = given_reward(played)
        if reward is None:
            with self._replica.tally.scoring.of(1):
                reward, score_s = await self._scoring.score(prompt=lease.prompt_text, completion=played.last_text, fields=with_messages(lease.fields, played.messages))
        self._replica.tally.answered(scored=not reward.HasField("unscored"))
        trajectory = trajectory_of(
            played, leased_prompt=leased_prompt, group_id=lease.group_id, sample_index=index, replica_id=me.replica_id, reward=reward, generate_s=generate_s, score_s=score_s
        )  # fmt: skip
        await self._submit(group, Finished(run_id=me.run_id, lease_id=lease.lease_id, group_id=lease.group_id, sample_index=index, trajectory=trajectory.SerializeToString()))

    def _wants_place(self, sample: tuple[str, int], wants: bool) -> None:
        """Whether a sample counts among those that have or want a place in the engine."""
        if wants:
            self._drawing.add(sample)
        else:
            self._drawing.discard(sample)
            self._changed.set()

    async def _reward(self, group: _Group, index: int, text: str) -> tuple[pb.Reward, float] | None:
        """The reward and its seconds; None: the sample's group was given up."""
        if group.together is not None:
            return await group.together.reward(index, text)
        with self._replica.tally.scoring.of(1):
            return await self._scoring.score(prompt=group.lease.prompt_text, completion=text, fields=group.lease.fields)

    async def _draw(self, group: _Group, index: int, prompt_ids: list[int], spec: SamplingSpec, watched: Watched) -> Delta | None:
        """The whole completion, from what is known of it on; when the engine dies, from what was last seen on. None when a drain came first."""
        drawing = watched.drawing
        while drawing.finish is None and await self._until_loaded(group.lease.least_version):
            rest = drawing.rest(spec, num_prompt_tokens=len(prompt_ids), max_model_len=self._replica.engine.info.max_model_len)
            if rest is None:
                drawing.finish = "length"
                break
            self._serial += 1
            drawing.begin(f"{group.lease.group_id}/{index}/{self._serial}")
            try:
                with self._replica.tally.drawing.of(1), self._given():
                    async with aclosing(self._replica.generate([*prompt_ids, *drawing.token_ids], rest, drawing.request_id, stream=False)) as deltas:
                        last = await anext(deltas)
            except EngineUnavailableError as error:
                drawing.stop()
                logger.info("sample (%s, %d) is drawn on from token %d: %s", group.lease.group_id, index, drawing.num_tokens, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            drawing.end(last)
            if last.finish == "abort":
                return None
        return drawing.whole() if drawing.finish is not None else None

    @contextmanager
    def _given(self) -> Iterator[None]:
        """One sample is with the engine."""
        self._num_given += 1
        try:
            yield
        finally:
            self._num_given -= 1
            self._changed.set()

    async def _until_loaded(self, least_version: int) -> bool:
        """Whether it may be drawn now (drawing earlier would break the staleness bound by one); False once the replica drains."""
        while not self._replica.draining:
            if self._num_given >= self._replica.limit:  # a group may be larger than what fits: the rest follows as places are free
                await self._wait(_PAUSE_S)
                continue
            if self._replica.engine.loaded_version >= least_version and self._replica.state == rollout_pb2.REPLICA_STATE_SERVING:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def _finished(self, lease: learner_pb2.Lease, index: int, last: Delta, *, text: str, reward: pb.Reward, generate_s: float, score_s: float) -> Finished:
        assert self._me is not None, "a group in hand was leased as somebody"
        assert last.finish is not None and last.token_ids, "a finished sample has at least one token"
        rest = pb.Trajectory(
            group_id=lease.group_id, sample_index=index, spans=version_spans(last.spans), finish_reason=FINISH[last.finish],
            unusable_reason=unusable_reason(last.token_ids, last.logprobs, num_known=self._tokens.size), replica_id=self._me.replica_id, reward=reward, generate_s=generate_s, score_s=score_s,
        )  # fmt: skip
        payload = encoded(rest, prompt_ids=unpack(lease.prompt_ids), completion_ids=last.token_ids, logprobs=last.logprobs, text=text)
        return Finished(run_id=self._me.run_id, lease_id=lease.lease_id, group_id=lease.group_id, sample_index=index, trajectory=payload)

    async def _submit(self, group: _Group, finished: Finished) -> None:
        receipt = await self._submitting.submit(finished)
        if receipt.status == learner_pb2.RECEIPT_STATUS_UNWANTED:
            logger.info("group %s is not wanted any more: %s", receipt.group_id, receipt.detail)
        if receipt.status == learner_pb2.RECEIPT_STATUS_UNWANTED or receipt.group_is_over:
            for task in group.tasks.values():
                if task is not asyncio.current_task():
                    task.cancel()
