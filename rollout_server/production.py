"""One sample, from its lease to its receipt: drawn (or played), scored, submitted.

    produce   waits for the least version and a place in the engine, for the scorer, for the receipt;   unblocked by an update, a sample's end
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

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
from rollout_server.places import Places
from rollout_server.played import given_reward, trajectory_of, with_messages
from rollout_server.replica import Replica
from rollout_server.reporting import Fence, Reporting, Watched
from rollout_server.scoring import Scoring
from rollout_server.submitting import Finished, Submitting
from rollout_server.together import Together
from rollout_server.tokens import Tokens
from rollout_server.usable import unusable_reason
from rollout_server.wire import FINISH, drawing_of, sampling_spec, version_spans

logger = logging.getLogger("headrace.rollout.production")

POLL_S = 0.02
PAUSE_S = 0.2  # after a refused or failed call


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
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


class Production:
    """`me()`: as whom the last lease was asked for. Example: `await production.produce(group, 3)`"""

    def __init__(
        self, *, replica: Replica, tokens: Tokens, scoring: Scoring, submitting: Submitting, reporting: Reporting, places: Places, me: Callable[[], Who], episodes: Episodes | None
    ) -> None:
        self._replica = replica
        self._tokens = tokens
        self._scoring = scoring
        self._submitting = submitting
        self._reporting = reporting
        self._places = places
        self._me = me
        self._episodes = episodes  # None: every sample is one answer
        self._serial = 0

    async def produce(self, group: Group, index: int) -> None:
        """Its failures are its caller's to keep from other samples. Raises CancelledError when the group is given up."""
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

    def _fence(self, group: Group) -> Fence:
        return Fence(run_id=self._me().run_id, lease_id=group.lease.lease_id)

    async def _finish(self, group: Group, index: int, prompt_ids: list[int], spec: SamplingSpec, watched: Watched) -> None:
        """Draws what is left of a sample, has it scored, submits it."""
        lease, start_s = group.lease, time.monotonic()
        last = await self._draw(group, index, prompt_ids, spec, watched)
        self._places.leave((lease.group_id, index))
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

    async def _play(self, group: Group, index: int, spec: SamplingSpec, name: str, task: Task) -> None:
        """A sample of several turns. Between them it has no place in the engine."""
        assert self._episodes is not None
        lease, me, start_s, sample = group.lease, self._me(), time.monotonic(), (group.lease.group_id, index)
        draw = LeasedDraw(
            self._replica, spec, f"{lease.group_id}/{index}", until_loaded=lambda: self._until_loaded(group.lease.least_version),
            busy=lambda busy: (self._places.want if busy else self._places.leave)(sample),
        )  # fmt: skip
        self._places.leave(sample)
        leased_prompt = [int(token) for token in unpack(lease.prompt_ids)]
        room = min(len(leased_prompt) + spec.max_new_tokens, self._replica.engine.info.max_model_len)
        try:
            played = await self._episodes.play(name, task, draw=draw, room_tokens=room, may_begin=lambda: not self._replica.draining)
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

    async def _reward(self, group: Group, index: int, text: str) -> tuple[pb.Reward, float] | None:
        """The reward and its seconds; None: the sample's group was given up."""
        if group.together is not None:
            return await group.together.reward(index, text)
        with self._replica.tally.scoring.of(1):
            return await self._scoring.score(prompt=group.lease.prompt_text, completion=text, fields=group.lease.fields)

    async def _draw(self, group: Group, index: int, prompt_ids: list[int], spec: SamplingSpec, watched: Watched) -> Delta | None:
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
                with self._replica.tally.drawing.of(1), self._places.given():
                    async with aclosing(self._replica.generate([*prompt_ids, *drawing.token_ids], rest, drawing.request_id, stream=False)) as deltas:
                        last = await anext(deltas)
            except EngineUnavailableError as error:
                drawing.stop()
                logger.info("sample (%s, %d) is drawn on from token %d: %s", group.lease.group_id, index, drawing.num_tokens, error)
                await asyncio.sleep(PAUSE_S)
                continue
            drawing.end(last)
            if last.finish == "abort":
                return None
        return drawing.whole() if drawing.finish is not None else None

    async def _until_loaded(self, least_version: int) -> bool:
        """Whether it may be drawn now (drawing earlier would break the staleness bound by one); False once the replica drains."""
        while not self._replica.draining:
            if self._places.num_given >= self._replica.limit:  # a group may be larger than what fits: the rest follows as places are free
                await self._places.wait(PAUSE_S)
                continue
            if self._replica.engine.loaded_version >= least_version and self._replica.state == rollout_pb2.REPLICA_STATE_SERVING:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _finished(self, lease: learner_pb2.Lease, index: int, last: Delta, *, text: str, reward: pb.Reward, generate_s: float, score_s: float) -> Finished:
        me = self._me()
        assert last.finish is not None and last.token_ids, "a finished sample has at least one token"
        rest = pb.Trajectory(
            group_id=lease.group_id, sample_index=index, spans=version_spans(last.spans), finish_reason=FINISH[last.finish],
            unusable_reason=unusable_reason(last.token_ids, last.logprobs, num_known=self._tokens.size), replica_id=me.replica_id, reward=reward, generate_s=generate_s, score_s=score_s,
        )  # fmt: skip
        payload = encoded(rest, prompt_ids=unpack(lease.prompt_ids), completion_ids=last.token_ids, logprobs=last.logprobs, text=text)
        return Finished(run_id=me.run_id, lease_id=lease.lease_id, group_id=lease.group_id, sample_index=index, trajectory=payload)

    async def _submit(self, group: Group, finished: Finished) -> None:
        receipt = await self._submitting.submit(finished)
        if receipt.status == learner_pb2.RECEIPT_STATUS_UNWANTED:
            logger.info("group %s is not wanted any more: %s", receipt.group_id, receipt.detail)
        if receipt.status == learner_pb2.RECEIPT_STATUS_UNWANTED or receipt.group_is_over:
            for task in group.tasks.values():
                if task is not asyncio.current_task():
                    task.cancel()
