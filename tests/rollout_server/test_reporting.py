"""A replica reports unfinished samples and draws on where another left off; served log-probs are those of the recorded ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from protos.arrays import pack_floats, pack_ids, unpack
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.rollout_server import reference
from tests.rollout_server.conftest import Start
from tests.rollout_server.fakes import PROMPT, FakeLearner, FakeReward, a_lease


def at(learner: FakeLearner, reward: FakeReward) -> dict[str, Any]:
    return {"learner": f"127.0.0.1:{learner.port}", "rewards": [f"127.0.0.1:{reward.port}"], "replica_id": "r"}


def lent(*, every: int = 4, group_size: int = 1, max_new_tokens: int = 40, parts: tuple[pb.PartialSample, ...] = (), attempt: int = 1) -> pb.Lease:
    lease = a_lease(0, group_size=group_size, max_new_tokens=max_new_tokens, attempt=attempt)
    lease.report_every_tokens = every
    lease.parts.extend(parts)
    return lease


def ids(packed: trajectory_pb2.PackedArray) -> list[int]:
    return [int(token) for token in unpack(packed)]


def part_of(reports: list[pb.ReportProgressRequest]) -> pb.PartialSample:
    """The reports of one sample as the learner would lend them, checked as it would check them."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for report in reports:
        assert report.part.start == len(tokens)
        assert report.digest_before == xxhash.xxh3_64_intdigest(pack_ids(tokens).data)
        tokens += ids(report.part.token_ids)
        logprobs += [float(value) for value in unpack(report.part.logprobs)]
        assert [report.part.spans[0].start, report.part.spans[-1].end] == [0, len(tokens)]
    last = reports[-1].part
    return pb.PartialSample(sample_index=last.sample_index, token_ids=pack_ids(tokens), logprobs=pack_floats(logprobs), spans=last.spans, finish_reason=last.finish_reason)


def check_logprobs(trajectory: trajectory_pb2.Trajectory, models: dict[int, Any]) -> None:
    """Token by token: a fresh pass over the recorded ids by the weights of the token's version."""
    completion, served = ids(trajectory.completion_ids), [float(value) for value in unpack(trajectory.logprobs)]
    assert trajectory.spans[-1].end == len(completion) == len(served)
    for span in trajectory.spans:
        expected = reference.logprobs(models[span.version], PROMPT, completion)[span.start : span.end]
        assert reference.largest_difference(served[span.start : span.end], expected) < 1e-4, span


async def test_an_unfinished_sample_is_reported_as_it_grows(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await start(step_s=0.05, **at(learner, reward))
    await learner.lend(lent(max_new_tokens=80))
    await learner.until(lambda: len(learner.submitted) == 1)
    assert len(learner.progress) >= 2
    assert all(len(report.part.token_ids.data) >= 16 for report in learner.progress)  # four tokens at least
    assert {(report.run_id, report.lease_id, report.group_id) for report in learner.progress} == {("run-1", "l0.1", "g0")}
    part = part_of(learner.progress)
    assert ids(part.token_ids) == ids(learner.submitted[0].completion_ids)[: len(ids(part.token_ids))]


async def test_nothing_is_reported_unless_the_lease_asks_for_it(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await start(step_s=0.05, **at(learner, reward))
    await learner.lend(lent(every=0))
    await learner.until(lambda: len(learner.submitted) == 1)
    assert not learner.progress


async def test_a_lease_with_parts_is_drawn_on_from_there(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, other_model: Path) -> None:
    models = {1: reference.load(tiny_model), 2: reference.load(other_model)}
    earlier = [70, 71, 72, 73, 74]
    scores = reference.logprobs(models[1], PROMPT, earlier)
    part = pb.PartialSample(sample_index=0, token_ids=pack_ids(earlier), logprobs=pack_floats(scores), spans=[trajectory_pb2.VersionSpan(version=1, start=0, end=5)])
    learner.publish(2, other_model)
    running = await start(**at(learner, reward))
    lease = lent(max_new_tokens=12, parts=(part,), attempt=2)
    lease.least_version = 2
    await learner.lend(lease)
    await learner.until(lambda: len(learner.submitted) == 1)
    [trajectory] = learner.submitted
    assert ids(trajectory.completion_ids)[:5] == earlier and len(ids(trajectory.completion_ids)) == 12
    assert [(span.version, span.start, span.end) for span in trajectory.spans] == [(1, 0, 5), (2, 5, 12)]
    assert ids(trajectory.prompt_ids) == PROMPT  # the tokens of the part are no prompt
    check_logprobs(trajectory, models)
    assert running.engine.stats().num_tokens == 7  # five of twelve were not drawn again


async def test_a_finished_part_is_only_scored(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    part = pb.PartialSample(
        sample_index=0, token_ids=pack_ids([70, 71]), logprobs=pack_floats([-1.0, -2.0]), spans=[trajectory_pb2.VersionSpan(version=1, start=0, end=2)],
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
    )  # fmt: skip
    learner.publish(2, tiny_model)
    running = await start(**at(learner, reward))
    await learner.lend(lent(parts=(part,), attempt=2))
    await learner.until(lambda: len(learner.submitted) == 1)
    [trajectory] = learner.submitted
    assert (ids(trajectory.completion_ids), trajectory.finish_reason) == ([70, 71], trajectory_pb2.FINISH_REASON_STOP)
    assert trajectory.reward.HasField("score") and running.engine.stats().num_tokens == 0


async def test_a_finished_sample_that_waits_for_its_score_is_reported(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await reward.stop()  # nobody scores
    await start(**at(learner, reward), score_timeout_s=60.0)
    await learner.lend(lent(every=1000, max_new_tokens=6))
    await learner.until(lambda: bool(learner.progress))
    [report] = learner.progress
    assert len(ids(report.part.token_ids)) == 6 and report.part.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    await asyncio.sleep(2.5)
    assert len(learner.progress) == 1  # once is enough


async def test_a_draining_replica_hands_back_what_it_has_drawn(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    running = await start(step_s=0.05, **at(learner, reward))
    await learner.lend(lent(every=1000, max_new_tokens=200))
    await learner.until(lambda: any(beat.num_running for beat in learner.heartbeats))
    await asyncio.sleep(0.5)
    learner.order(pb.AttendResponse(drain=pb.DrainOrder(grace_s=0.1)))
    await learner.until(lambda: learner.goodbyes == 1)
    [report] = learner.progress
    assert 1 <= len(ids(report.part.token_ids)) < 200 and not report.part.finish_reason
    assert len(ids(report.part.token_ids)) == running.engine.stats().num_tokens  # to the last token


async def test_after_the_word_that_another_holds_the_group_nothing_more_is_said(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    learner.progress_status = lambda _: pb.PROGRESS_STATUS_FOREIGN
    await start(step_s=0.05, **at(learner, reward))
    await learner.lend(lent(max_new_tokens=90))
    await learner.until(lambda: len(learner.submitted) == 1)
    assert len(learner.progress) == 1


async def test_reports_go_on_from_where_the_learner_stands(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    learner.progress_status = lambda _: pb.PROGRESS_STATUS_FULL if len(learner.progress) == 1 else pb.PROGRESS_STATUS_ACCEPTED
    await start(step_s=0.05, **at(learner, reward))
    await learner.lend(lent(max_new_tokens=90))
    await learner.until(lambda: len(learner.submitted) == 1)
    assert [report.part.start for report in learner.progress[:2]] == [0, 0]  # the first was not kept
    part_of(learner.progress[1:])


async def test_a_sample_is_drawn_on_when_the_engine_comes_up_again(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.publish(1, tiny_model)
    running = await start(step_s=0.05, **at(learner, reward))
    asked: list[int] = []  # tokens that each request began with
    generate = running.engine.generate

    def counted(prompt_ids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        asked.append(len(prompt_ids))
        return generate(prompt_ids, *args, **kwargs)

    monkeypatch.setattr(running.engine, "generate", counted)
    await learner.lend(lent(max_new_tokens=60))
    await learner.until(lambda: bool(learner.progress))
    known = ids(part_of(list(learner.progress)).token_ids)
    await running.engine.stop()
    await learner.until(lambda: len(learner.submitted) == 1, limit_s=30)
    [trajectory] = learner.submitted
    assert ids(trajectory.completion_ids)[: len(known)] == known
    check_logprobs(trajectory, {1: reference.load(tiny_model)})
    assert asked[0] == len(PROMPT) and asked[-1] >= len(PROMPT) + len(known)
