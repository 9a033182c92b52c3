"""What a well-formed trajectory is, and what makes a sample unusable."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from learner.gateway.groups import SampleFacts
from learner.gateway.trajectories import facts_of
from protos.arrays import pack_floats, pack_ids, pack_mask
from protos.learner.v1alpha1 import learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from tests.learner.gateway.gateway_harness import sample

LEASE = learner_pb2.Lease(group_id="g00000003", prompt_ids=pack_ids([4, 6]))


def facts(**changes: Any) -> SampleFacts:
    return facts_of(sample(LEASE, 1, 7, **changes), prompt_ids=LEASE.prompt_ids.data, vocabulary=10)


def test_facts_of_a_usable_sample() -> None:
    found = facts(loss_mask=pack_mask([1, 0, 1]), spans=[pb.VersionSpan(version=7, start=0, end=1), pb.VersionSpan(version=8, start=1, end=3)], finish_reason=pb.FINISH_REASON_LENGTH)
    assert found.usable and found.reward == 1.0 and found.truncated
    assert (found.num_prompt_tokens, found.num_completion_tokens, found.num_trained_tokens) == (2, 3, 2)
    assert found.spans == ((7, 1), (8, 1))  # tokens that are trained on


def test_a_record_has_every_fact_and_gives_equal_facts_back() -> None:
    found = facts()
    record = found.to_record()
    assert set(record) == {field.name for field in fields(SampleFacts)}
    assert SampleFacts.from_record(record) == found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": pack_floats([-1, math.inf, -1])}, "non_finite_logprob"),
        ({"reward": None}, "unscored_timeout"),
        ({"reward": math.nan}, "unscored_unspecified"),
        ({"unusable_reason": "tool_crashed"}, "tool_crashed"),
        ({"finish_reason": pb.FINISH_REASON_ABORT}, "aborted"),
        ({"loss_mask": pack_mask([0, 0, 0])}, "nothing_to_train"),
    ],
)
def test_unusable_samples_say_why(changes: dict[str, Any], reason: str) -> None:
    found = facts(**changes)
    assert not found.usable and found.unusable_reason == reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": pack_ids([4])}, "prompt_ids are not the leased ones"),
        ({"prompt_ids": pack_ids([])}, "prompt_ids must be int32 and not empty"),
        ({"completion_ids": pack_ids([])}, "at least one id"),
        ({"completion_ids": pack_ids([5, 10, 5])}, r"in \[0, 10\)"),
        ({"completion_ids": pack_floats([1, 2, 3])}, "completion_ids: dtype is 2, must be 1"),
        ({"logprobs": pack_floats([-1, -1])}, "2 values for 3 completion tokens"),
        ({"loss_mask": pack_mask([1])}, "1 values for 3 completion tokens"),
        ({"loss_mask": pack_mask([1, 2, 1])}, "zeros and ones, got 2"),
        ({"finish_reason": pb.FINISH_REASON_UNSPECIFIED}, "finish_reason is not set"),
        ({"spans": []}, "spans end at 0, the completion has 3 tokens"),
        ({"spans": [pb.VersionSpan(version=7, start=0, end=2)]}, "spans end at 2"),
        ({"spans": [pb.VersionSpan(version=7, start=1, end=3)]}, "must follow each other"),
        ({"spans": [pb.VersionSpan(version=7, start=0, end=2), pb.VersionSpan(version=7, start=1, end=3)]}, "must follow each other"),
        ({"spans": [pb.VersionSpan(version=7, start=0, end=2), pb.VersionSpan(version=6, start=2, end=3)]}, "versions must not fall"),
    ],
)
def test_malformed_trajectories_are_refused_with_the_rule_and_the_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        facts(**changes)


def strand(**changes: Any) -> pb.Strand:
    fields: dict[str, Any] = {
        "prompt_ids": pack_ids([4, 6, 7]), "completion_ids": pack_ids([1, 2]), "logprobs": pack_floats([-1, -2]), "loss_mask": pack_mask([0, 1]),
        "spans": [pb.VersionSpan(version=8, start=0, end=2)],
    }  # fmt: skip
    return pb.Strand(**{**fields, **changes})


def test_strands_of_a_sample_are_counted_together() -> None:
    # faults.md 71: 3 + 1 trained tokens and 2 + 3 prompt tokens of one sample
    turns = [pb.Turn(strand=0, start=0, end=3, reward=0.5), pb.Turn(strand=1, start=1, end=2)]
    found = facts(more_strands=[strand()], turns=turns)
    assert found.usable and (found.num_strands, found.num_turns) == (2, 2)
    assert (found.num_prompt_tokens, found.num_completion_tokens, found.num_trained_tokens) == (5, 5, 4)
    assert found.spans == ((7, 3), (8, 1))


def test_a_prompt_of_the_samples_own_is_compared_with_nothing() -> None:
    assert facts(prompt_ids=pack_ids([4, 6, 9]), own_prompt=True).usable
    with pytest.raises(ValueError, match=r"prompt_ids must lie in \[0, 10\)"):
        facts(prompt_ids=pack_ids([4, 10]), own_prompt=True)


@pytest.mark.parametrize(("room", "prompt", "reason"), [(3, [4, 6, 7], ""), (3, [4, 6, 7, 1], "overlong"), (2, [4, 6], "overlong")])
def test_each_context_is_bounded_by_the_leased_prompt_and_what_may_be_drawn_after_it(room: int, prompt: list[int], reason: str) -> None:
    # leased are 2 tokens: with room for 3 more a context may be 5 long; they are 2 + 3 and 3 + 2, or 4 + 2
    sent = sample(LEASE, 1, 7, more_strands=[strand(prompt_ids=pack_ids(prompt))])
    assert facts_of(sent, prompt_ids=LEASE.prompt_ids.data, vocabulary=10, max_new_tokens=room).unusable_reason == reason


def test_a_sample_that_failed_before_its_first_token_is_in_the_account_with_its_reason() -> None:
    failed = pb.Trajectory(group_id="g00000003", sample_index=1, prompt_ids=LEASE.prompt_ids, unusable_reason="environment_error", finish_reason=pb.FINISH_REASON_ABORT)
    found = facts_of(failed, prompt_ids=LEASE.prompt_ids.data, vocabulary=10)
    assert found.unusable_reason == "environment_error" and found.reward is None and found.spans == () and found.num_turns == 0
    assert SampleFacts.from_record(found.to_record()) == found


def test_a_strand_with_a_log_prob_that_is_not_finite_takes_its_sample_along() -> None:
    assert facts(more_strands=[strand(logprobs=pack_floats([-1, math.nan]))]).unusable_reason == "non_finite_logprob"
    assert facts(more_strands=[strand()] * 64).unusable_reason == "too_many_strands"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"more_strands": [strand(prompt_ids=pack_ids([]))]}, "prompt_ids must be int32 and not empty"),
        ({"more_strands": [strand(prompt_ids=pack_ids([12]))]}, "prompt_ids must lie in [0, 10)"),
        ({"more_strands": [strand(completion_ids=pack_ids([]))]}, "at least one id"),
        ({"more_strands": [strand(loss_mask=pack_mask([1]))]}, "loss_mask: 1 values for 2 completion tokens"),
        ({"more_strands": [strand(spans=[])]}, "spans end at 0, the completion has 2 tokens"),
        ({"turns": [pb.Turn(strand=1, start=0, end=1)]}, "strand 1, but strands have [3] tokens"),
        ({"turns": [pb.Turn(strand=0, start=2, end=2)]}, "a turn over [2, 2)"),
        ({"turns": [pb.Turn(strand=0, start=0, end=1, reward=math.inf)]}, "has the reward inf"),
        ({"unusable_reason": "x", "completion_ids": pack_ids([])}, "has no completion_ids, but log-probs"),
    ],
)
def test_malformed_strands_and_turns_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        facts(**changes)
    assert words in str(refusal.value)
