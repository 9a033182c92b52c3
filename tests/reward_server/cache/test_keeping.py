"""Keys, memory, and flights: pure."""

from __future__ import annotations

from functools import partial

import pytest

from reward_server.cache.flights import Flights, Passenger
from reward_server.cache.key import Scope
from reward_server.cache.memory import MemoryCache, size
from reward_server.cache.shared import decode, encode
from reward_server.outcome import Outcome, Scored


def test_a_key_depends_on_name_version_configuration_and_every_text() -> None:
    scope = Scope("a", "1", {"x": 1, "y": 2})
    key = scope.key("p", "c", b"f")
    assert key == Scope("a", "1", {"y": 2, "x": 1}).key("p", "c", b"f") and len(key) == 16
    others = [
        *(each.key("p", "c", b"f") for each in (Scope("b", "1", {"x": 1, "y": 2}), Scope("a", "2", {"x": 1, "y": 2}), Scope("a", "1", {"x": 1}))),
        *(scope.key(*texts) for texts in (("q", "c", b"f"), ("p", "d", b"f"), ("p", "c", b"g"), ("pc", "", b"f"), ("", "pc", b"f"), ("p", "cf", b""))),
    ]
    assert len({key, *others}) == 10


def test_memory_keeps_within_its_bytes_and_drops_what_was_not_asked_for_longest() -> None:
    one = Scored(value=1.0, parts={"part": 2.0})
    assert size(one) == 504  # 400 for the entry, 100 + 4 for the part
    cache = MemoryCache(max_bytes=1600)
    for key in (b"a", b"b", b"c"):
        cache.put(key, one)
    assert cache.num_bytes == 1512 and cache.get(b"a") == one
    cache.put(b"d", one)
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.put(b"a", Scored(value=2.0))
    assert cache.num_bytes == 400 + 504 + 504 and cache.num_evicted == 1 and len(cache) == 3


def test_a_score_larger_than_the_memory_is_not_kept() -> None:
    cache = MemoryCache(max_bytes=100)
    cache.put(b"a", Scored(value=1.0))
    assert cache.get(b"a") is None and cache.num_bytes == 0


@pytest.mark.parametrize(
    "data", [b"", b"nonsense", b"\xc1", encode(Scored(value=1.0))[:-1], b"\x93\x02\x01\x80", b"\x93\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x80", b"\x93\x01\xc0\x80", b"\x93\x01\x01\x01"]
)  # empty, text, no msgpack, cut, schema 2, a NaN, nil, parts that are no map
def test_what_redis_holds_instead_of_a_score_is_no_score(data: bytes) -> None:
    assert decode(data) is None


def test_a_score_survives_the_way_to_redis_and_back() -> None:
    kept = Scored(value=0.1, parts={"a": -1.0, "b": 1e300})
    assert decode(encode(kept)) == kept


class Desk:
    """Notes who flew and who was answered."""

    def __init__(self) -> None:
        self.flights = Flights()
        self.flew: list[str] = []
        self.answered: list[str] = []

    def board(self, owner: str, key: bytes = b"k") -> None:
        self.flights.board(key, Passenger(owner=owner, fly=partial(self.flew.append, owner), answer=partial(self._answer, owner)))

    def _answer(self, owner: str, outcome: Outcome) -> None:
        self.answered.append(owner)


def test_equal_requests_fly_once_and_land_together() -> None:
    desk = Desk()
    for owner in "abc":
        desk.board(owner)
    assert desk.flew == ["a"] and desk.flights.num_joined == 2
    desk.flights.land(b"k", Scored(value=1.0))
    assert desk.answered == ["a", "b", "c"] and len(desk.flights) == 0
    desk.flights.land(b"k", Scored(value=1.0))
    assert desk.answered == ["a", "b", "c"]


def test_when_the_one_who_flew_goes_the_next_one_flies() -> None:
    desk = Desk()
    for owner in "abc":
        desk.board(owner)
    desk.flights.forget("b")
    assert desk.flew == ["a"]
    desk.flights.forget("a")
    assert desk.flew == ["a", "c"] and desk.flights.flown_by(b"k") == "c"
    desk.flights.forget("c")
    assert desk.flights.flown_by(b"k") is None and not desk.answered
