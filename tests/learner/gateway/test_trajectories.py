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
