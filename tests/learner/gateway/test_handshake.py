"""A stranger is refused with both values in the message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from learner.gateway.handshake import Claim, Identity, refusal

RUN = Identity(run_id="r1", contract="v1", base_weights_digest="w", tokenizer_digest="t", template_digest="c", served_dtype="float32", needed_tokens=40)
CLAIM = Claim(replica_id="a", incarnation=1, run_id="r1", contract="v1", base_weights_digest="w", tokenizer_digest="t", template_digest="c", served_dtype="float32", max_model_len=40)


def test_a_replica_of_this_run_is_welcome() -> None:
    assert refusal(CLAIM, RUN) == ""


def test_a_replica_that_was_told_no_run_accepts_any() -> None:
    assert refusal(replace(CLAIM, run_id=""), RUN) == ""


@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("run_id", "r2", "r1"),
        ("contract", "v0", "v1"),
        ("base_weights_digest", "other", "w"),
        ("tokenizer_digest", "other", "t"),
        ("template_digest", "other", "c"),
        ("served_dtype", "bfloat16", "float32"),
        ("max_model_len", 39, "40"),
    ],
)
def test_each_difference_is_refused_naming_both_values(field: str, value: object, ours: str) -> None:
    message = refusal(replace(CLAIM, **{field: value}), RUN)  # type: ignore[arg-type]
    assert str(value) in message and ours in message


def test_a_claim_without_an_identity_is_refused() -> None:
    assert "replica_id" in refusal(replace(CLAIM, replica_id=""), RUN)
    assert "incarnation" in refusal(replace(CLAIM, incarnation=0), RUN)
