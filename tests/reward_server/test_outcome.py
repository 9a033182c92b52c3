"""What a scorer may return, and how records' fields arrive."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct

from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from reward_server.fields import decode
from reward_server.outcome import MAX_DETAIL_CHARS, MAX_PARTS, Scored, Unscored, checked, clean
from reward_server.wire import from_proto


@pytest.mark.parametrize(
    ("result", "value"), [(1.5, 1.5), (2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (-0.0, 0.0)]
)
def test_numbers_of_any_kind_are_scores(result: Any, value: float) -> None:
    assert checked(result) == Scored(value=value)


def test_parts_come_as_a_pair_or_a_dict() -> None:
    assert checked((0.5, {"format": 1})) == Scored(value=0.5, parts={"format": 1.0})
    assert checked({"score": 0.5, "format": 1}) == Scored(value=0.5, parts={"format": 1.0})


@pytest.mark.parametrize(
    "result",
    [float("nan"), float("inf"), -float("inf"), None, "0.5", [1.0], object(), 1j, 10**400, {}, {"value": 1}, (1.0, None), (1.0, {"a": "b"}), (1.0, {"a": float("nan")}), (None, {})],
)
def test_anything_that_is_no_finite_number_is_unscored_and_not_zero(result: Any) -> None:
    outcome = checked(result)
    assert isinstance(outcome, Unscored) and outcome.reason == "non_finite" and outcome.detail


def test_unscored_passes_with_its_reason_and_an_invented_reason_is_an_error() -> None:
    assert checked(Unscored("no gold")) == Unscored("no gold", "refused")
    assert checked(Unscored("later", "unavailable")) == Unscored("later", "unavailable")
    outcome = checked(Unscored("x", "tired"))  # type: ignore[arg-type]
    assert isinstance(outcome, Unscored) and outcome.reason == "error" and "tired" in outcome.detail


def test_words_are_bounded_and_free_of_unpaired_surrogates() -> None:
    assert clean("a\ud800b") == "a?b"
    assert len(clean("x" * 10_000)) == MAX_DETAIL_CHARS
    assert checked((1.0, {"\ud800": 1.0})) == Scored(value=1.0, parts={"?": 1.0})
    too_many = checked((1.0, {str(i): 1.0 for i in range(MAX_PARTS + 1)}))
    assert isinstance(too_many, Unscored) and too_many.reason == "error"


def test_integral_numbers_of_a_struct_become_integers_again() -> None:
    struct = Struct()
    struct.update({"gold": 5, "half": 0.5, "negative": -7, "flag": True, "none": None, "huge": 2.0**60, "deep": {"list": [1, 2.5, "x", [False]]}})
    plain = decode(struct.SerializeToString())
    assert plain == {"gold": 5, "half": 0.5, "negative": -7, "flag": True, "none": None, "huge": 2.0**60, "deep": {"list": [1, 2.5, "x", [False]]}}
    assert type(plain["gold"]) is int and type(plain["flag"]) is bool and type(plain["huge"]) is float
    assert str(plain["gold"]) == "5"
    assert decode(b"") == {}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_another_server_says_is_no_score_where_a_number_is_not_finite(number: float) -> None:
    for score in (pb.Score(value=number), pb.Score(value=0.5, parts={"style": number})):
        outcome = from_proto(pb.Reward(score=score))
        assert isinstance(outcome, Unscored) and outcome.reason == "non_finite" and f"{number}" in outcome.detail
    assert from_proto(pb.Reward(score=pb.Score(value=0.5, parts={"style": 1.0}))) == Scored(value=0.5, parts={"style": 1.0})
    assert from_proto(pb.Reward()) == Unscored("an answer without an outcome", "error")
