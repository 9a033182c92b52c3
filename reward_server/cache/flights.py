"""Equal requests at the same time are computed once: the first flies, the others wait for it to land. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from reward_server.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Passenger:
    """Somebody who waits for one outcome.

    Example: `Passenger(owner=stream, fly=begin_the_work, answer=print)`
    """

    owner: Hashable
    fly: Callable[[], None]  # begins the work in this owner's name
    answer: Callable[[Outcome], None]


class Flights:
    """By key: who waits; the first of them is the one in whose name the work is done."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Passenger]] = {}
        self.num_joined = 0  # that did not fly themselves

    def __len__(self) -> int:
        return len(self._waiting)

    def flown_by(self, key: bytes) -> Hashable | None:
        """The owner in whose name the work is done; None: nobody waits for it."""
        waiting = self._waiting.get(key)
        return waiting[0].owner if waiting else None

    def board(self, key: bytes, passenger: Passenger) -> None:
        """Flies, or joins who flies already."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(passenger)
            self.num_joined += 1
            return
        self._waiting[key] = [passenger]
        passenger.fly()

    def land(self, key: bytes, outcome: Outcome) -> None:
        """Everybody who waits gets the outcome. A key that nobody waits for any more is passed by."""
        for passenger in self._waiting.pop(key, ()):
            passenger.answer(outcome)

    def forget(self, owner: Hashable) -> None:
        """Drops an owner, whose work has been dropped as well: where it flew for others, the next of them flies."""
        for key in list(self._waiting):
            waiting = self._waiting[key]
            if all(each.owner != owner for each in waiting):
                continue
            flew = waiting[0].owner == owner
            left = [each for each in waiting if each.owner != owner]
            if not left:
                del self._waiting[key]
                continue
            self._waiting[key] = left
            if flew:
                left[0].fly()
