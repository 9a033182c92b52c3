"""What happened to the prompts so far: how many groups each data set had, and, where its settings ask for it, to each prompt.

Part of the account: it changes by records alone, so a restart, or a cut without its journal, chooses on as an unbroken run would. Which
prompt comes next is a pure function of this (picking.py); the outcome stands in the record `opened`, so replaying never chooses again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is kept of one data set. Example: Rules(weight=1.0, tracked=True, kept_rates=4, pass_reward=0.5, requeue=("attempts",))"""

    weight: float = 1.0
    tracked: bool = False  # whether anything is kept of each prompt
    kept_rates: int = 1
    kept_steps: int = 1
    pass_reward: float = 0.5
    requeue: tuple[str, ...] = ()  # reasons of drops
    requeue_most: int = 1

    def to_record(self) -> list[Any]:
        return [self.weight, self.tracked, self.kept_rates, self.kept_steps, self.pass_reward, list(self.requeue), self.requeue_most]

    @classmethod
    def from_record(cls, record: list[Any]) -> Rules:
        weight, tracked, kept_rates, kept_steps, pass_reward, requeue, requeue_most = record
        return cls(weight=weight, tracked=tracked, kept_rates=kept_rates, kept_steps=kept_steps, pass_reward=pass_reward, requeue=tuple(requeue), requeue_most=requeue_most)


class Track(NamedTuple):
    """One prompt that was given; never changed but replaced, so that a copy of the account shares it: a save must not stop the gateway.

    Example: Track(times=2, last_seq=7, epoch=1, again=0, steps=(0, 3), rates=(0.25,))
    """

    times: int = 0  # groups
    last_seq: int = -1
    epoch: int = -1  # of its newest ordinary turn; -1: it had none
    again: int = 0  # times that it was given again since
    steps: tuple[int, ...] = ()  # policy steps of its newest groups
    rates: tuple[float, ...] = ()  # pass rates of its newest measured groups, the newest last


COUNTERS = ("again", "outside", "band_empty", "rest_short", "given_up", "measured")  # picks by reason; drops that were not given again; groups measured


@dataclass(kw_only=True, slots=True)
class SetHistory:
    """One data set. given: groups since its data began; phase: since a set ended, came back or was weighed otherwise.

    epoch, at: pass, and place in its order, of the next ordinary turn (tracked sets). order: rows of this pass where it was sorted, as
    little-endian int32, else empty. lost: rows of dropped groups that are to be given again, oldest first. fresh: rows that changed since
    picking.py looked; not part of the state.
    """

    rules: Rules = Rules()
    given: int = 0
    phase: int = 0
    ended: bool = False
    epoch: int = 0
    at: int = 0
    order: bytes = b""
    lost: list[int] = field(default_factory=list)
    tracks: dict[int, Track] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    fresh: set[int] = field(default_factory=set)

    def to_state(self) -> list[Any]:
        tracks = [list(self.tracks), list(self.tracks.values())]
        return [self.rules.to_record(), self.given, self.phase, self.ended, self.epoch, self.at, self.order, list(self.lost), tracks, dict(self.counters)]

    @classmethod
    def from_state(cls, state: list[Any]) -> SetHistory:
        rules, given, phase, ended, epoch, at, order, lost, tracks, counters = state
        kept = {row: Track(times, last_seq, turn, again, tuple(steps), tuple(rates)) for row, (times, last_seq, turn, again, steps, rates) in zip(*tracks, strict=True)}
        return cls(
            rules=Rules.from_record(rules), given=given, phase=phase, ended=ended, epoch=epoch, at=at, order=order, lost=list(lost), tracks=kept, counters=dict(counters), fresh=set(kept)
        )  # fmt: skip


class History:
    """By data set; a run of one has the name "". version: rises with every change, so that a choice can be kept until then."""

    def __init__(self) -> None:
        self.sets: dict[str, SetHistory] = {}
        self.version = 0

    def look(self, name: str) -> SetHistory:
        """To read only: a set that nothing happened to yet is in no state."""
        return self.sets.get(name) or SetHistory()

    def of(self, name: str) -> SetHistory:
        """To change, by a record."""
        if name not in self.sets:
            self.sets[name] = SetHistory()
        return self.sets[name]

    def set_rules(self, rules: Mapping[str, Rules], *, restart: bool) -> None:
        """From now on. restart: the data are others, so everything begins anew. Shares count from here where weights changed."""
        self.version += 1
        if restart:
            self.sets = {}
        if {name: value.rules.weight for name, value in self.sets.items()} != {name: value.weight for name, value in rules.items()}:
            self._new_phase()
        for name, value in rules.items():
            self.of(name).rules = value

    def opened(self, name: str, row: int, *, seq: int, step: int, pick: Mapping[str, Any]) -> None:
        """A group of a set was opened. pick: what picking.py noted (empty for plain passes)."""
        self.version += 1
        for ended in pick.get("ended", ()):
            self.of(ended).ended = True
        if pick.get("ended"):
            self._new_phase()
        one = self.of(name)
        one.given += 1
        one.phase += 1
        if one.rules.tracked:
            self._track(one, row, seq, step, pick)

    def _track(self, one: SetHistory, row: int, seq: int, step: int, pick: Mapping[str, Any]) -> None:
        track, why = one.tracks.get(row, Track()), pick.get("why", "order")
        again, epoch = 0, track.epoch
        if why == "again":
            one.lost.remove(row)
            again = track.again + 1
        if why == "order":
            one.order = pick.get("order", one.order if pick["epoch"] == one.epoch else b"")
            one.epoch, one.at = pick["epoch"], pick["at"]
            epoch = one.epoch
        else:
            one.counters[why] += 1
        one.tracks[row] = Track(times=track.times + 1, last_seq=seq, epoch=epoch, again=again, steps=(*track.steps, step)[-one.rules.kept_steps :], rates=track.rates)
        one.fresh.add(row)

    def measured(self, name: str, row: int, rewards: Iterable[float]) -> None:
        """A group is complete; rewards of its usable samples. One without any says nothing of the prompt."""
        one, values = self.of(name), list(rewards)
        if not one.rules.tracked or row not in one.tracks or not values:
            return
        self.version += 1
        track, rate = one.tracks[row], sum(value >= one.rules.pass_reward for value in values) / len(values)
        one.tracks[row] = track._replace(rates=(*track.rates, rate)[-one.rules.kept_rates :])
        one.counters["measured"] += 1
        one.fresh.add(row)

    def dropped(self, name: str, row: int, reason: str) -> None:
        """A group was dropped; its prompt is given again where the rules say so."""
        one = self.of(name)
        if reason not in one.rules.requeue or row not in one.tracks:
            return
        self.version += 1
        if one.tracks[row].again + one.lost.count(row) >= one.rules.requeue_most:
            one.counters["given_up"] += 1
            return
        one.lost.append(row)
        if one.ended:
            one.ended = False
            self._new_phase()

    def _new_phase(self) -> None:
        for one in self.sets.values():
            one.phase = 0

    def to_state(self) -> dict[str, Any]:
        """Msgpack-able; `from_state` makes an equal one."""
        return {name: one.to_state() for name, one in self.sets.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        history = cls()
        history.sets = {name: SetHistory.from_state(saved) for name, saved in state.items()}
        return history
