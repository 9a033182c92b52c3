"""Chooses prompts of one set by what is known of each: pass rates, when it was last given, whether it is solved or hopeless.

Every choice follows from the set's history. What is kept between two calls (classes of prompts, a heap) only saves looking at every prompt
again, and is built anew from the history after a restart.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from learner.data_config import BandCurriculum, PickedConfig, SortedCurriculum
from learner.gateway.history import SetHistory, Track
from learner.gateway.prompts import PromptOrder

Class = Literal["in", "outside", "solved", "parked"]
UNKNOWN = 0.5  # pass rate by which a prompt is sorted that nobody has measured


class MeasuredPasses:
    """Passes that leave out what is solved, parked, resting or outside the band, and turns for those outside in between.

    first_row: of the set in the catalog. difficulty: by row within the set, of prompts that have one.
    """

    def __init__(self, config: PickedConfig, order: PromptOrder, *, first_row: int = 0, difficulty: Mapping[int, float] | None = None) -> None:
        self._config, self._order, self._first_row = config, order, first_row
        self._difficulty = dict(difficulty or {})
        self._owner: SetHistory | None = None
        self._classes: dict[int, Class] = {}
        self._counts: Counter[Class] = Counter()
        self._outside: list[tuple[int, int]] = []  # heap of (last_seq, row); an entry is stale once the prompt was given or came in

    @property
    def num_prompts(self) -> int:
        return self._order.num_rows

    def next(self, one: SetHistory, step: int) -> tuple[int, dict[str, Any]] | None:
        """None: no pass is left, or every prompt is solved or parked."""
        self._follow(one)
        if one.lost:
            return one.lost[0], {"why": "again"}
        if self._counts["solved"] + self._counts["parked"] == self._order.num_rows:
            return None
        if self._is_turn_outside(one.given) and (row := self._longest_outside(one, step)) is not None:
            return row, {"why": "outside"}
        return self._in_order(one, step)

    def counts(self, one: SetHistory) -> dict[str, int]:
        """Prompts by class, and those of dropped groups that come again."""
        self._follow(one)
        return {**{name: self._counts[name] for name in ("in", "outside", "solved", "parked")}, "again": len(one.lost)}

    # What is known of a prompt

    def rate(self, track: Track | None, row: int) -> float | None:
        """Mean of the newest pass rates, or what its difficulty says; None: unknown."""
        curriculum = self._config.curriculum
        if track is not None and track.rates:
            newest = track.rates[-(curriculum.groups if curriculum else 1) :]
            return sum(newest) / len(newest)
        difficulty = self._difficulty.get(row - self._first_row)
        return None if difficulty is None else 1.0 - difficulty

    def _class_of(self, track: Track | None, row: int) -> Class:
        replay, rates = self._config.replay, track.rates if track else ()
        if replay.solved_rate is not None and len(rates) >= replay.solved_groups:
            newest = rates[-replay.solved_groups :]
            if sum(newest) / len(newest) >= replay.solved_rate:
                return "solved"
        if replay.unsolved_groups is not None and len(rates) >= replay.unsolved_groups and not any(rates[-replay.unsolved_groups :]):
            return "parked"
        band, rate = self._config.curriculum, self.rate(track, row)
        return "outside" if isinstance(band, BandCurriculum) and rate is not None and not band.low <= rate <= band.high else "in"

    def _rests(self, track: Track | None, step: int) -> bool:
        replay = self._config.replay
        if replay.within_steps is None or track is None or len(track.steps) < replay.most:
            return False
        return step - track.steps[-replay.most] < replay.within_steps

    def _follow(self, one: SetHistory) -> None:
        """Brings the classes up to the history."""
        if self._owner is not one:
            self._owner, self._classes, self._outside = one, {}, []
            rows = range(self._first_row, self._first_row + self._order.num_rows)
            self._counts = Counter({"in": len(rows)})
            one.fresh.update(one.tracks, (row for row in rows if row - self._first_row in self._difficulty))
        for row in sorted(one.fresh):
            track = one.tracks.get(row)
            new = self._class_of(track, row)
            self._counts[self._classes.get(row, "in")] -= 1
            self._counts[new] += 1
            self._classes[row] = new
            if new == "outside":
                heapq.heappush(self._outside, (track.last_seq if track else -1, row))
        one.fresh.clear()

    # Whose turn it is

    def _is_turn_outside(self, given: int) -> bool:
        """Spread evenly: of the first n groups, floor(n * min_share) are turns outside."""
        band = self._config.curriculum
        if not isinstance(band, BandCurriculum):
            return False
        share = Fraction(repr(band.min_share))
        return (given + 1) * share // 1 > given * share // 1

    def _longest_outside(self, one: SetHistory, step: int) -> int | None:
        """Of the prompts outside the band that need not rest, the one that was not given for longest."""
        aside: list[tuple[int, int]] = []
        found: int | None = None
        while self._outside and found is None:
            entry = heapq.heappop(self._outside)
            last_seq, row = entry
            track = one.tracks.get(row)
            if self._classes.get(row) != "outside" or last_seq != (track.last_seq if track else -1):
                continue
            aside.append(entry)
            if not self._rests(track, step):
                found = row
        for entry in aside:
            heapq.heappush(self._outside, entry)
        return found

    def _in_order(self, one: SetHistory, step: int) -> tuple[int, dict[str, Any]] | None:
        """The next of this pass, or of the one after; where neither has any, one that is outside, or should rest."""
        rechecked = self._config.replay.recheck_epochs is not None and self._counts["solved"] + self._counts["parked"] > 0
        if self._counts["in"] or rechecked:
            for epoch, start in ((one.epoch, one.at), (one.epoch + 1, 0)):
                if self._order.epochs is not None and epoch >= self._order.epochs:
                    return None
                if (found := self._along(one, step, epoch, start)) is not None:
                    return found
        if (row := self._longest_outside(one, step)) is not None:
            return row, {"why": "outside" if self._counts["in"] else "band_empty"}
        given = [(track.last_seq, row) for row, track in one.tracks.items() if self._classes.get(row, "in") in ("in", "outside")]
        return (min(given)[1], {"why": "rest_short"}) if given else None

    def _along(self, one: SetHistory, step: int, epoch: int, start: int) -> tuple[int, dict[str, Any]] | None:
        rows, first_row = self._rows(one, epoch)
        for index in range(start, len(rows)):
            row = first_row + int(rows[index])
            track = one.tracks.get(row)
            if self._is_due(row, track, epoch) and not self._rests(track, step):
                note: dict[str, Any] = {"why": "order", "epoch": epoch, "at": index + 1}
                if isinstance(self._config.curriculum, SortedCurriculum) and (epoch != one.epoch or not one.order):
                    note["order"] = (np.asarray(rows, dtype="<i4") + first_row).astype("<i4").tobytes()
                return row, note
        return None

    def _is_due(self, row: int, track: Track | None, epoch: int) -> bool:
        kind = self._classes.get(row, "in")
        if kind in ("solved", "parked"):
            recheck = self._config.replay.recheck_epochs
            return recheck is not None and track is not None and epoch - track.epoch > recheck
        return kind == "in"

    def _rows(self, one: SetHistory, epoch: int) -> tuple[Sequence[int] | npt.NDArray[np.int32], int]:
        """Rows of a pass in order, and what to add to each: a running sorted pass has its order in the history, since rates go on changing."""
        if epoch == one.epoch and one.order:
            return np.frombuffer(one.order, dtype="<i4"), 0
        rows, curriculum = self._order.rows(epoch), self._config.curriculum
        if not isinstance(curriculum, SortedCurriculum):
            return rows, self._first_row
        sign = -1.0 if curriculum.first == "easy" else 1.0
        return sorted(rows, key=lambda row: sign * self._sorting_rate(one, self._first_row + row)), self._first_row

    def _sorting_rate(self, one: SetHistory, row: int) -> float:
        rate = self.rate(one.tracks.get(row), row)
        return UNKNOWN if rate is None else rate
