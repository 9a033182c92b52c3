"""Ranks of one round find one another in a store that remembers the rounds before."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from learner.trainer.rounds import fresh

LIMIT = timedelta(seconds=10)


def meet(store: Store, order: tuple[int, ...], delay_s: float = 0.0) -> list[Store]:
    """The parts that three ranks get, started in an order."""
    parts: dict[int, Store] = {}
    threads = [threading.Thread(target=lambda rank=rank: parts.__setitem__(rank, fresh(store, rank=rank, size=3, timeout=LIMIT))) for rank in order]  # type: ignore[misc]
    for thread in threads:
        thread.start()
        threading.Event().wait(delay_s)
    for thread in threads:
        thread.join(20)
    return [parts[rank] for rank in range(3)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_later_round_sees_nothing_of_an_earlier_one_whoever_comes_first(order: tuple[int, ...]) -> None:
    store = HashStore()
    first = meet(store, order)
    first[1].set("address", "of a process that is dead by now")
    assert first[2].get("address") == b"of a process that is dead by now"  # one corner for all
    second = meet(store, order, delay_s=0.2)
    assert not second[2].check(["address"])
    second[0].set("address", "fresh")
    assert second[2].get("address") == b"fresh" == second[1].get("address")


def test_a_round_that_rank_0_opened_and_died_in_holds_nobody_up() -> None:
    store = HashStore()
    store.set("headrace/round", "headrace/1")  # no rank answered it
    parts = meet(store, (1, 2, 0), delay_s=0.2)
    parts[0].set("here", "1")
    assert parts[1].check(["here"]) and parts[2].check(["here"])


def test_a_rank_alone_says_what_is_missing() -> None:
    with pytest.raises(TimeoutError, match="rank 1: rank 0 opened no round within 0 s"):
        fresh(HashStore(), rank=1, size=2, timeout=timedelta(seconds=0.2))
