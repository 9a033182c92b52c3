"""Samples of several turns through a whole rollout server on the small engine (faults.md 76)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2

from learner.gateway.trajectories import facts_of
from protos.arrays import pack_ids, unpack
from protos.learner.v1alpha1 import learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.fields import plain
from tests.rollout_server import reference
from tests.rollout_server.conftest import Start
from tests.rollout_server.fakes import FakeLearner, FakeReward, a_lease
from tests.rollout_server.test_actor import at

PLUGINS = "tests.rollout_server.environments.plugins"
VOCABULARY = 259


def environment(use: str = f"{PLUGINS}:Echo", **values: Any) -> dict[str, Any]:
    return {"name": "e", "use": use, "template": "raw", "max_turn_tokens": 4, "step_timeout_s": 20, "sessions_per_process": 8, **values}


def lease(number: int, *, fields: dict[str, Any] | None = None, prompt: str = "1 + 1", **values: Any) -> learner_pb2.Lease:
    made = a_lease(number, **{"max_new_tokens": 200, **values})
    made.prompt_text = prompt
    made.prompt_ids.CopyFrom(pack_ids([*prompt.encode()]))
    packed = struct_pb2.Struct()
    packed.update(fields or {})
    made.fields.CopyFrom(packed)
    return made


def words(t: pb.Trajectory) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """Prompt, completion, log-probs and mask of each strand."""
    found = []
    for part in (t, *t.more_strands):
        ids = [int(i) for i in unpack(part.completion_ids)]  # type: ignore[attr-defined]
        mask = [int(m) for m in unpack(part.loss_mask)] if part.HasField("loss_mask") else [1] * len(ids)  # type: ignore[attr-defined]
        found.append(([int(i) for i in unpack(part.prompt_ids)], ids, [float(x) for x in unpack(part.logprobs)], mask))  # type: ignore[attr-defined]
    return found


async def test_turns_are_drawn_after_exactly_the_recorded_ids_and_count_as_one_sample(
    start: Start, learner: FakeLearner, reward: FakeReward, other_model: Path
) -> None:
    learner.publish(1, other_model)
    await learner.lend(lease(0, group_size=3))
    await start(environments=[environment(options={"turns": 3})], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 3, 60)
    model = reference.load(other_model)
    for t in learner.submitted:
        ((prompt, ids, logprobs, mask),) = words(t)
        assert [(turn.start, turn.end, turn.reward) for turn in t.turns] and len(t.turns) == 3 and [turn.reward for turn in t.turns] == [1, 1, 1]
        assert t.reward.score.value == 3.0 and t.reward.scorer == "environment:e" and t.finish_reason == pb.FINISH_REASON_STOP and not t.unusable_reason
        assert sum(mask) == sum(turn.end - turn.start for turn in t.turns) < len(ids)
        evaluated = reference.logprobs(model, prompt, ids)
        assert max(abs(a - b) for a, b, m in zip(logprobs, evaluated, mask, strict=True) if m) < 1e-4  # a fresh forward pass on the recorded ids
        assert all(x == 0 for x, m in zip(logprobs, mask, strict=True) if not m)
        facts = facts_of(t, prompt_ids=bytes(t.prompt_ids.data), vocabulary=VOCABULARY, max_new_tokens=200)
        assert facts.usable and facts.num_turns == 3 and facts.num_trained_tokens == sum(mask)
    assert not reward.requests and len({bytes(t.completion_ids.data) for t in learner.submitted}) == 3


async def test_a_conversation_that_outgrows_its_context_ends_as_cut_and_keeps_its_turns(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    # faults.md 76: five prompt tokens and room for 16: each turn takes 4, and what is said between them 6 or more ("[....]"), so the third does not fit
    learner.publish(1, tiny_model)
    await learner.lend(lease(0, group_size=1, max_new_tokens=16))
    await start(environments=[environment(options={"turns": 100}, max_turns=100)], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 1, 60)
    (t,) = learner.submitted
    assert t.finish_reason == pb.FINISH_REASON_LENGTH and not t.unusable_reason and 1 <= len(t.turns) <= 2
    assert t.reward.score.value == len(t.turns)
    ((prompt, ids, _, mask),) = words(t)
    assert len(prompt) + len(ids) <= 5 + 16 and mask[-1] == 1
    assert facts_of(t, prompt_ids=bytes(t.prompt_ids.data), vocabulary=VOCABULARY, max_new_tokens=16).truncated


async def test_the_number_of_turns_is_bounded_and_an_unfinished_sample_has_the_stated_reward(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(lease(0, group_size=1, fields={"answer": "2"}))
    await start(environments=[environment("calculator", max_turns=2, unfinished_reward=-0.5, options={"malformed": "?"})], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 1, 60)
    (t,) = learner.submitted
    done = t.finish_reason == pb.FINISH_REASON_STOP  # noise rarely ends in "=", so it answers at its first turn; else it is cut at the second
    assert len(t.turns) <= 2 and t.reward.score.value == (0.0 if done else -0.5)


@pytest.mark.parametrize(
    ("how", "when", "reason", "num_turns"),
    [("raise", "reset", "environment_error", 0), ("raise", "step", "environment_error", 1), ("exit", "step", "environment_died", 1), ("nan", "step", "environment_bad_answer", 1)],
)
async def test_an_environments_failure_is_a_typed_absence_and_harms_no_other(
    start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, how: str, when: str, reason: str, num_turns: int
) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(lease(0, group_size=1, fields={"how": how, "when": when}), lease(1, group_size=1))
    running = await start(environments=[environment(f"{PLUGINS}:Bad", sessions_per_process=1)], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 2, 60)
    by_group = {t.group_id: t for t in learner.submitted}
    failed, good = by_group["g0"], by_group["g1"]
    assert failed.unusable_reason == reason and len(failed.turns) == num_turns and failed.reward.WhichOneof("outcome") == "unscored"
    facts = facts_of(failed, prompt_ids=bytes(failed.prompt_ids.data), vocabulary=VOCABULARY)
    assert facts.unusable_reason == reason and facts.reward is None  # never 0
    assert not good.unusable_reason and good.reward.score.value == 2.0
    assert running.service.episodes is not None
    assert running.service.episodes.places["e"].host.tally[reason.removeprefix("environment_")] == 1


async def test_a_record_names_its_environment_or_is_asked_once(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(lease(0, group_size=1, fields={"environment": "e"}), lease(1, group_size=1, fields={"environment": "x"}), lease(2, group_size=1, max_new_tokens=8), lease(3, group_size=1, fields={"environment": ""}, max_new_tokens=8))
    await start(environments=[environment(), environment("calculator", name="other")], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 4, 60)
    by_group = {t.group_id: t for t in learner.submitted}
    assert len(by_group["g0"].turns) == 2 and by_group["g1"].unusable_reason == "environment_unknown"
    assert not by_group["g2"].turns and not by_group["g3"].turns and by_group["g2"].reward.scorer == "s"  # two environments: without a name it is one answer


async def test_where_the_environment_gives_nothing_the_reward_server_is_asked_with_all_that_was_said(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(lease(0, group_size=1))
    await start(environments=[environment(f"{PLUGINS}:Silent")], **at(learner, reward))
    await learner.until(lambda: len(learner.submitted) == 1, 60)
    (request,) = reward.requests
    said = [(m["role"], m["content"]) for m in plain(request.fields)["messages"]]
    assert [role for role, _ in said] == ["user", "assistant", "user", "assistant"] and said[0][1] == "1 + 1"
    assert request.completion == said[-1][1] and learner.submitted[0].reward.scorer == "s"


def test_an_environment_that_cannot_be_played_is_a_users_mistake_in_one_line() -> None:
    from pydantic import ValidationError

    from rollout_server.config import RolloutConfig

    for values, rule in (
        ([{"name": "a", "use": "calc"}], "use='calc' is none of calculator, tower_of_hanoi, module:Class, grpc://host:port"),
        ([{"name": "a", "use": "calculator"}, {"name": "a", "use": "calculator"}], "the name 'a' is given twice"),
        ([{"name": "a", "use": "grpc://h:1", "options": {"x": 1}}], "options and agent are matters of the server"),
        ([{"name": "a", "use": "calculator", "agent": True}], "is an environment and no agent"),
    ):
        with pytest.raises(ValidationError) as refusal:
            RolloutConfig.model_validate({"model": "m", "environments": values})
        assert rule in str(refusal.value)
    with pytest.raises(ValidationError, match="score_groups=true with environments"):
        RolloutConfig.model_validate({"model": "m", "score_groups": True, "environments": [{"name": "a", "use": "calculator"}]})
