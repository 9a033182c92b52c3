"""A whole rollout server on the small engine against a fake learner and a fake reward server, over loopback."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import grpc
import pytest

from protos.arrays import unpack
from protos.identity import group_seed, sample_seed
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.concurrency import Window
from rollout_server.engine import SamplingSpec
from rollout_server.membership import RefusedError
from tests.rollout_server import reference
from tests.rollout_server.conftest import Start
from tests.rollout_server.fakes import PROMPT, FakeLearner, FakeReward, a_lease


def at(learner: FakeLearner, reward: FakeReward) -> dict[str, object]:
    return {"learner": f"127.0.0.1:{learner.port}", "rewards": (f"127.0.0.1:{reward.port}",), "replica_id": "a"}


def identities(learner: FakeLearner) -> list[tuple[str, int]]:
    return sorted((t.group_id, t.sample_index) for t in learner.submitted)


async def test_a_leased_group_comes_back_sampled_scored_and_labelled(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, other_model: Path
) -> None:
    learner.publish(1, other_model)
    await learner.lend(a_lease(0), a_lease(1, group_size=3))
    await start(**at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 5)
    assert identities(learner) == [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1), ("g1", 2)]
    model = reference.load(other_model)
    for t in learner.submitted:
        ids = [int(i) for i in unpack(t.completion_ids)]
        assert [(s.version, s.start, s.end) for s in t.spans] == [(1, 0, 8)] and t.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert reference.largest_difference([float(x) for x in unpack(t.logprobs)], reference.logprobs(model, PROMPT, ids)) < 1e-4
        assert t.reward.score.value == len(t.text) and t.reward.scorer == "s" and not t.unusable_reason and t.replica_id == "a"
    assert set(learner.run_ids) == {"run-1"} and {r.prompt for r in reward.requests} == {"1 + 1"}
    assert len({bytes(t.completion_ids.data) for t in learner.submitted}) == 5  # no two samples share a seed


async def test_the_first_token_waits_for_the_least_version(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, other_model: Path
) -> None:
    # faults.md 120: what is sampled first is of the version that the lease asks for
    learner.publish(1, tiny_model)
    running = await start(**at(learner, reward))
    await learner.until(lambda: any(beat.loaded_version == 1 for beat in learner.heartbeats))
    await learner.lend(a_lease(0, least_version=2))
    await asyncio.sleep(0.4)
    assert running.engine.stats().num_tokens == 0 and not learner.submitted
    learner.publish(2, other_model)
    await learner.until(lambda: len(learner.submitted) == 2)
    assert {s.version for t in learner.submitted for s in t.spans} == {2}


async def test_done_samples_are_not_drawn_again_and_a_second_lease_of_a_group_in_hand_adds_nothing(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    running = await start(step_s=0.02, **at(learner, reward))
    await learner.lend(a_lease(0, group_size=4, done=(0, 2), max_new_tokens=30))
    await learner.until(lambda: any(beat.num_running == 2 for beat in learner.heartbeats))
    await learner.lend(a_lease(0, group_size=4, done=(0, 2), max_new_tokens=30, attempt=2))
    await learner.until(lambda: len(learner.submitted) >= 2)
    await asyncio.sleep(0.3)
    assert identities(learner) == [("g0", 1), ("g0", 3)]
    assert running.service.actor is not None and running.service.actor.num_groups == 0


async def test_what_has_no_receipt_is_sent_again_after_the_gateway_came_back(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    learner.receipts = lambda t: pb.RECEIPT_STATUS_ACCEPTED if t.sample_index == 0 else None
    await start(**at(learner, reward))
    await learner.lend(a_lease(0, group_size=3))
    await learner.until(lambda: len(learner.submitted) == 3)
    await learner.stop()
    first, learner.submitted = learner.submitted, []
    learner.receipts = lambda _: pb.RECEIPT_STATUS_ACCEPTED
    await learner.start()
    await learner.until(lambda: len(learner.submitted) == 2)
    assert identities(learner) == [("g0", 1), ("g0", 2)]
    kept = {t.sample_index: t for t in first}
    assert all(t.completion_ids == kept[t.sample_index].completion_ids for t in learner.submitted)  # sent again, not drawn again
    await learner.until(lambda: len(learner.hellos) >= 2)
    before, after = learner.hellos[0], learner.hellos[-1]
    assert (after.replica_id, after.incarnation, after.run_id) == (before.replica_id, before.incarnation, "run-1")


async def test_unwanted_ends_the_rest_of_the_group(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    learner.receipts = lambda _: pb.RECEIPT_STATUS_UNWANTED
    lease = a_lease(0, group_size=3, max_new_tokens=200)
    running = await start(step_s=0.1, **at(learner, reward))
    await learner.until(lambda: any(beat.loaded_version == 1 for beat in learner.heartbeats))
    seed = sample_seed(lease.sampling.seed, 0)
    probe = [d async for d in running.engine.generate(PROMPT, SamplingSpec(temperature=1.0, max_new_tokens=1, seed=seed), "probe")]
    lease.sampling.stop_token_ids.append(probe[0].token_ids[0])  # sample 0 ends at once, the others most likely do not
    await learner.lend(lease)
    await learner.until(lambda: bool(learner.submitted))
    async with asyncio.timeout(30):
        while running.engine.stats().num_running:
            await asyncio.sleep(0.01)
    first = learner.submitted[0]
    assert first.sample_index == 0 and len(first.completion_ids.data) == 4  # one stop token is a sample
    assert first.finish_reason == trajectory_pb2.FINISH_REASON_STOP and len(learner.submitted) < 3


async def test_a_non_finite_logprob_makes_its_sample_unusable_and_harms_no_other(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_server import sampling as sampling_module
    from rollout_server import small_engine

    # faults.md 47: of eight samples one carries NaN, one -inf; six arrive usable
    original = sampling_module.draw
    lease = a_lease(0, group_size=8)
    poisoned = {sample_seed(lease.sampling.seed, 2): math.nan, sample_seed(lease.sampling.seed, 5): -math.inf}

    def draw(logits, sampling, generator):  # type: ignore[no-untyped-def]
        token, logprob = original(logits, sampling, generator)
        return token, poisoned.get(sampling.seed, logprob)

    monkeypatch.setattr(small_engine, "draw", draw)
    learner.publish(1, tiny_model)
    await learner.lend(lease)
    await start(**at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 8)
    assert {t.sample_index: t.unusable_reason for t in learner.submitted if t.unusable_reason} == {
        2: "non_finite_logprob", 5: "non_finite_logprob",
    }  # fmt: skip


async def test_without_an_answer_in_time_a_sample_is_unscored_and_still_submitted(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    reward.silent = True
    learner.publish(1, tiny_model)
    await learner.lend(a_lease(0, group_size=1))
    await start(score_timeout_s=0.3, **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 1)
    assert learner.submitted[0].reward.WhichOneof("outcome") == "unscored"
    assert learner.submitted[0].reward.unscored.reason == trajectory_pb2.UNSCORED_REASON_TIMEOUT


async def test_a_refusal_is_final_and_carries_the_learners_words(start: Start, learner: FakeLearner, reward: FakeReward) -> None:
    learner.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "its base weights digest is aa, this run's is bb")
    running = await start(**at(learner, reward))
    with pytest.raises(RefusedError, match="digest is aa, this run's is bb"):
        await asyncio.wait_for(running.serving, 60)


async def test_a_learner_that_is_not_there_yet_is_waited_for_and_said_so_once(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner.publish(1, tiny_model)
    await learner.stop()
    running = await start(**at(learner, reward))
    async with asyncio.timeout(60):
        while not any("is not there" in record.message for record in caplog.records):
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # it tries again meanwhile, and says no more
    status = await running.stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=30)
    assert status.state == rollout_pb2.REPLICA_STATE_WAITING and not running.serving.done()
    assert len([r for r in caplog.records if "is not there" in r.message and "learner" in r.message]) == 1
    await learner.start()
    await learner.until(lambda: any(beat.state == rollout_pb2.REPLICA_STATE_SERVING for beat in learner.heartbeats))


async def test_the_end_of_the_run_ends_the_server(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    running = await start(**at(learner, reward))
    await learner.until(lambda: bool(learner.heartbeats))
    learner.order(pb.AttendResponse(run_finished=pb.RunFinished(reason="20 steps")))
    await asyncio.wait_for(running.serving, 60)


async def test_a_drain_order_and_a_stop_finish_what_runs_and_say_goodbye(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    for number, by_order in enumerate((True, False)):
        learner.heartbeats.clear()
        learner.submitted.clear()
        running = await start(step_s=0.01, **at(learner, reward))
        await learner.lend(a_lease(number, max_new_tokens=40))
        await learner.until(lambda: any(beat.num_running for beat in learner.heartbeats))
        if by_order:
            learner.order(pb.AttendResponse(drain=pb.DrainOrder(grace_s=10)))
        else:
            running.service.stop()
        await asyncio.wait_for(running.serving, 60)
        assert len(learner.submitted) == 2 and learner.goodbyes == number + 1


async def test_a_dead_engine_comes_back_loads_the_newest_version_and_draws_its_samples_again(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, other_model: Path
) -> None:
    learner.publish(3, other_model)
    running = await start(step_s=0.01, **at(learner, reward))
    await learner.lend(a_lease(0, least_version=3, max_new_tokens=40))
    await learner.until(lambda: any(beat.num_running for beat in learner.heartbeats))
    await running.engine.stop()
    await learner.until(lambda: len(learner.submitted) == 2)
    assert running.service.replica.life == 2 and running.engine.loaded_version == 3
    assert {(s.version, s.start, s.end) for t in learner.submitted for s in t.spans} == {(3, 0, 40)}
    assert len(learner.hellos) >= 2


async def test_the_engine_is_never_asked_for_more_than_it_has_room_for(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(*[a_lease(i, group_size=3) for i in range(12)])
    running = await start(**at(learner, reward))
    most = 0
    async with asyncio.timeout(60):
        while len(learner.submitted) < 36:
            most = max(most, running.engine.stats().num_running)
            await asyncio.sleep(0.001)
    assert 3 < most <= 8


async def test_a_limit_below_the_engine_s_places_holds_even_for_a_group_that_is_larger(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    running = await start(**at(learner, reward))
    running.service.replica.window = Window.fixed(2)
    await learner.lend(*[a_lease(i, group_size=3) for i in range(6)])
    most = 0
    async with asyncio.timeout(60):
        while len(learner.submitted) < 18:
            most = max(most, running.engine.stats().num_running)
            await asyncio.sleep(0.001)
    assert most == 2 and running.service.replica.want == 3


async def test_samples_named_greedy_are_drawn_at_temperature_0_whatever_the_lease_is_for(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    training, evaluation = a_lease(0, group_size=3), a_lease(1, group_size=3)
    training.greedy.append(2)
    evaluation.greedy.append(0)
    evaluation.purpose = pb.LEASE_PURPOSE_EVALUATION
    await learner.lend(training, evaluation)
    running = await start(**at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 6)
    wanted = [d async for d in running.engine.generate(PROMPT, SamplingSpec(temperature=0, max_new_tokens=8), "probe", stream=False)][-1].token_ids
    greedy = {(t.group_id, t.sample_index) for t in learner.submitted if list(unpack(t.completion_ids)) == list(wanted)}
    assert greedy == {("g0", 2), ("g1", 0)}


async def test_room_is_counted_in_training_groups_though_an_evaluation_lends_smaller_ones(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path
) -> None:
    learner.publish(1, tiny_model)
    leases = [a_lease(number, group_size=4 if number == 0 else 1) for number in range(3)]
    for lease in leases[1:]:
        lease.purpose = pb.LEASE_PURPOSE_EVALUATION
    running = await start(**at(learner, reward))
    for lease in leases:
        await learner.lend(lease)
        await learner.until(lambda lease=lease: any(t.group_id == lease.group_id for t in learner.submitted))  # type: ignore[misc]
    assert running.service.actor is not None and running.service.actor._group_size == 4


async def test_four_replicas_draw_sixteen_different_samples_of_one_prompt(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    # faults.md 72: 16 tokens at T = 1 of a model that is next to uniform over its tokens; no seed is an engine's own constant
    learner.publish(1, tiny_model)
    for replica in "abcd":
        await start(**{**at(learner, reward), "replica_id": replica})
    for number in range(4):
        lease = a_lease(number, group_size=4, max_new_tokens=16)
        lease.sampling.seed = group_seed(0, f"g{number:08d}")
        await learner.lend(lease)
    await learner.until(lambda: len(learner.submitted) == 16)
    assert len({bytes(t.completion_ids.data) for t in learner.submitted}) == 16


async def test_the_rest_of_a_group_is_stopped_once_it_is_over(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    learner.over = lambda _: True
    lease = a_lease(0, group_size=3, max_new_tokens=200)
    running = await start(step_s=0.1, **at(learner, reward))
    await learner.until(lambda: any(beat.loaded_version == 1 for beat in learner.heartbeats))
    seed = sample_seed(lease.sampling.seed, 1)
    probe = [d async for d in running.engine.generate(PROMPT, SamplingSpec(temperature=1.0, max_new_tokens=1, seed=seed), "probe")]
    lease.sampling.stop_token_ids.append(probe[0].token_ids[0])  # sample 1 ends at once, the others most likely do not
    await learner.lend(lease)
    await learner.until(lambda: bool(learner.submitted))
    async with asyncio.timeout(30):
        while running.engine.stats().num_running:
            await asyncio.sleep(0.01)
    assert learner.submitted[0].sample_index == 1 and len(learner.submitted) < 3
