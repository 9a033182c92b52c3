"""Ranks agree on what each of them tried, and a rank that never comes costs a deadline."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from learner.trainer import accord
from learner.trainer.accord import Accord


def verdicts(store: dist.Store, name: str, said: dict[int, str], *, size: int, limit_s: float = 20.0) -> dict[int, str]:
    """What each rank that comes hears; said: by rank, "" is well."""
    heard: dict[int, str] = {}

    def rank(number: int, failure: str) -> None:
        mine = RANKS.setdefault((id(store), number), Accord(store, rank=number, size=size))
        mine.say(name, failure)
        heard[number] = mine.verdict(name, limit_s=limit_s)

    threads = [threading.Thread(target=rank, args=pair, daemon=True) for pair in said.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


RANKS: dict[tuple[int, int], Accord] = {}


def test_all_ranks_hear_that_all_went_well_and_old_names_are_let_go() -> None:
    store = dist.HashStore()
    for name in ("1/copy", "1/write", "2/copy"):
        assert verdicts(store, name, {0: "", 1: "", 2: ""}, size=3) == {0: "", 1: "", 2: ""}
    assert not store.check(["1/copy/0"]) and not store.check(["1/copy/verdict"]) and store.check(["2/copy/verdict"])


def test_all_ranks_hear_who_failed_and_why() -> None:
    assert verdicts(dist.HashStore(), "1/write", {0: "", 1: "disk full", 2: ""}, size=3) == dict.fromkeys(range(3), "rank 1: disk full")
    both = verdicts(dist.HashStore(), "1/write", {0: "connection closed", 1: "disk full"}, size=2)
    assert both == dict.fromkeys(range(2), "rank 0: connection closed; rank 1: disk full")


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    began_s = time.monotonic()
    assert verdicts(dist.HashStore(), "1/write", {0: "", 2: ""}, size=3, limit_s=0.3) == dict.fromkeys((0, 2), "rank 1 did not answer in time")
    assert time.monotonic() - began_s < 20


def test_ranks_without_rank_0_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accord, "_OTHERS_S", 0.1)
    monkeypatch.setattr(accord, "_VERDICT_S", 0.1)
    heard = verdicts(dist.HashStore(), "1/mark", {1: ""}, size=2, limit_s=0.2)
    assert heard[1].startswith("rank 0 gave no verdict")
