"""When processes are given up, and who goes next: pure arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from reward_server.lanes import MAX_BATCH_BYTES, Item, Lanes
from reward_server.rules import Verdict, batch_items, may_start, verdict


def item(seq: int, owner: str = "a", scorer: int = 0, text: str = "", alone: bool = False) -> Item:
    return Item(seq=seq, scorer=scorer, owner=owner, prompt="", completion=text, fields=b"", answer=lambda outcome: None, alone=alone)


def seqs(batch: list[Item]) -> list[int]:
    return [each.seq for each in batch]


@pytest.mark.parametrize(
    ("pace_s", "num_queued", "num_workers", "expected"),
    [
        (0.00001, 1000, 1, 64),  # 5 ms / 10 us = 500, at most 64
        (0.001, 1000, 1, 5),  # 5 ms / 1 ms
        (0.1, 1000, 1, 1),
        (0.00001, 64, 4, 16),  # a worker's share
        (0.00001, 1, 4, 1),
    ],
)
def test_a_batch_is_a_workers_share_and_about_five_milliseconds(pace_s: float, num_queued: int, num_workers: int, expected: int) -> None:
    assert batch_items(is_async=False, blocks=False, pace_s=pace_s, num_queued=num_queued, num_workers=num_workers) == expected


def test_async_calls_go_together_unless_they_block_the_event_loop() -> None:
    assert batch_items(is_async=True, blocks=False, pace_s=9.0, num_queued=100, num_workers=1) == 64
    assert batch_items(is_async=True, blocks=True, pace_s=9.0, num_queued=100, num_workers=1) == 1


def test_a_scorer_whose_calls_are_slow_takes_no_more_processes_than_its_bound() -> None:
    assert may_start(num_busy=3, num_slow=0, max_slow=2)
    assert may_start(num_busy=0, num_slow=7, max_slow=8)
    assert not may_start(num_busy=1, num_slow=7, max_slow=8)
    assert not may_start(num_busy=0, num_slow=8, max_slow=8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Verdict.WAIT),
        ({"running_s": 0.3}, Verdict.SLOW),
        ({"running_s": 0.3, "is_slow": True}, Verdict.WAIT),
        ({"is_async": True, "occupied_s": 0.3}, Verdict.SLOW),  # short calls, one after another, hold a worker too
        ({"running_s": 10.1, "is_slow": True}, Verdict.TIMEOUT),
        ({"running_s": 0.3, "all_gone": True}, Verdict.ABANDONED),
        ({"running_s": 0.2, "all_gone": True}, Verdict.WAIT),
        ({"is_async": True, "running_s": 10.5, "is_slow": True}, Verdict.WAIT),  # its own timeout comes first
        ({"is_async": True, "running_s": 11.1, "is_slow": True}, Verdict.RETRY_ALONE),
        ({"is_async": True, "running_s": 11.1, "is_slow": True, "num_unanswered": 1}, Verdict.TIMEOUT),
        ({"is_async": True, "running_s": 1.0, "silent_s": 0.9, "is_slow": True}, Verdict.RETRY_ALONE),
        ({"is_async": True, "running_s": 1.0, "silent_s": 0.9, "is_slow": True, "num_unanswered": 1}, Verdict.WAIT),
    ],
)
def test_verdicts_on_a_busy_process(changes: dict[str, Any], expected: Verdict) -> None:
    changes = {"occupied_s": changes.get("running_s", 0.1), **changes}
    facts: dict[str, Any] = {"is_async": False, "num_unanswered": 3, "all_gone": False, "is_slow": False, "running_s": 0.1, "silent_s": 0.0, "limit_s": 10.0, "patience_s": 0.25}
    assert verdict(**{**facts, **changes}) is expected


def test_lanes_take_turns_so_a_long_queue_of_one_stream_does_not_hold_up_another() -> None:
    lanes = Lanes()
    for seq in range(5):
        lanes.push(item(seq, "a"))
    lanes.push(item(10, "b"))
    assert seqs(lanes.take(lambda head: 2)) == [0, 1]
    assert seqs(lanes.take(lambda head: 2)) == [10]
    assert seqs(lanes.take(lambda head: 2)) == [2, 3]
    assert len(lanes) == 1


def test_a_scorer_without_room_is_passed_over() -> None:
    lanes = Lanes()
    lanes.push(item(0, scorer=0))
    lanes.push(item(1, scorer=1))
    assert seqs(lanes.take(lambda head: 4 * head.scorer)) == [1]
    assert lanes.take(lambda head: 4 * head.scorer) == []
    assert len(lanes) == 1


def test_items_put_back_come_first_in_their_order_and_alone_ones_by_themselves() -> None:
    lanes = Lanes()
    lanes.push(item(5, "b"))
    lanes.push(item(3))
    lanes.push_front([item(0), item(1, alone=True), item(2)])
    assert [seqs(lanes.take(lambda head: 9)) for _ in range(5)] == [[0], [5], [1], [2, 3], []]


def test_a_batch_is_bounded_in_bytes_but_never_empty() -> None:
    lanes = Lanes()
    for seq in range(3):
        lanes.push(item(seq, text="x" * (MAX_BATCH_BYTES // 2 + 1)))
    assert seqs(lanes.take(lambda head: 9)) == [0, 1]  # the first one is free, the third would pass the bound


def test_a_forgotten_owner_leaves_nothing() -> None:
    lanes = Lanes()
    for seq in range(3):
        lanes.push(item(seq, "a"))
        lanes.push(item(seq + 10, "b"))
    lanes.drop("a")
    assert len(lanes) == 3 and seqs(lanes.drain()) == [10, 11, 12] and len(lanes) == 0
