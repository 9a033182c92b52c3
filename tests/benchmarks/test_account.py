"""The reading of a journal that `recovery` counts lost and repeated groups with, on records made by hand."""

from __future__ import annotations

from typing import Any

from benchmarks import _account
from benchmarks._account import Reading


def reading(*records: dict[str, Any]) -> Reading:
    result = Reading()
    for record in records:
        _account._note(result, record)
    return result


def opened(*seqs: int) -> list[dict[str, Any]]:
    return [{"type": "opened", "seq": seq} for seq in seqs]


def step(number: int, *groups: int) -> list[dict[str, Any]]:
    return [{"type": "planned", "step": number, "groups": list(groups), "dropped": []}, {"type": "published", "step": number + 1, "closed": True}]


def test_a_group_trained_in_two_steps_is_twice() -> None:
    assert reading(*opened(0, 1, 2), *step(0, 0, 1), *step(1, 1, 2)).twice() == 1


def test_a_step_that_a_rollback_took_back_and_that_was_replayed_counts_once() -> None:
    assert reading(*opened(0, 1), *step(0, 0), *step(1, 1), {"type": "rolled_back", "step": 1}, *step(1, 1)).twice() == 0


def test_a_group_without_an_end_is_lost_once_it_is_too_old_to_be_open() -> None:
    """At most one group can be open; of 0 to 4 only 1 never ended, and 4 is open."""
    got = reading(*opened(0, 1, 2, 3, 4), *step(0, 0), *step(1, 2), *step(2, 3))
    assert got.lost(max_open=1) == 1
    assert got.lost(max_open=2) == 0


def test_a_sample_journaled_twice_is_twice() -> None:
    sample = {"type": "submitted", "seq": 0, "sample_index": 1, "dropped": ""}
    assert reading(*opened(0), sample, sample).twice() == 1
