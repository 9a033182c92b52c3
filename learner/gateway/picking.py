"""Which prompt the next group gets: a pure function of the account's history, the policy step and the settings.

    turn of a set (mixing.py) ─▶ a dropped group's prompt again ─▶ outside the band, if it is its turn ─▶ the next of the pass

Nothing is changed here: the pick goes into the record `opened`, and the history follows from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from learner.gateway.history import History, SetHistory
from learner.gateway.mixing import next_set
from learner.gateway.prompts import PromptOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """A prompt. Example: Pick(data_set="math", row=17, note={"why": "order", "epoch": 0, "at": 18})"""

    data_set: str  # "": the run has one without a name
    row: int  # of the catalog
    note: dict[str, Any] = field(default_factory=dict)  # for the record; empty for a plain pass


class Chooser(Protocol):
    """Chooses within one set: (row of the catalog, note), or None when the set has no prompt left."""

    @property
    def num_prompts(self) -> int: ...

    def next(self, one: SetHistory, step: int) -> tuple[int, dict[str, Any]] | None: ...

    def counts(self, one: SetHistory) -> dict[str, int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainPasses:
    """Passes over the whole set; its place follows from the number of its groups alone. first_row: of the set in the catalog."""

    order: PromptOrder
    first_row: int = 0

    @property
    def num_prompts(self) -> int:
        return self.order.num_rows

    def counts(self, one: SetHistory) -> dict[str, int]:
        """Nothing is known of single prompts."""
        return {}

    def next(self, one: SetHistory, step: int) -> tuple[int, dict[str, Any]] | None:
        row = self.order.row(one.given)
        return None if row is None else (self.first_row + row, {})


class Picker:
    """Of all sets, in the order of the configuration."""

    def __init__(self, weights: Mapping[str, int], choosers: Mapping[str, Chooser]) -> None:
        self._weights, self.choosers = dict(weights), dict(choosers)
        self._kept: tuple[tuple[int, int, int], Pick | None] | None = None

    def next(self, history: History, step: int) -> Pick | None:
        """None once no set has a prompt left. Asking again without a change in between gives the same."""
        now = (id(history), history.version, step)
        if self._kept is None or self._kept[0] != now:
            self._kept = (now, self._choose(history, step))
        return self._kept[1]

    def _choose(self, history: History, step: int) -> Pick | None:
        ended: list[str] = []
        left = {name: weight for name, weight in self._weights.items() if not history.look(name).ended}
        given = {name: history.look(name).phase for name in left}
        while left:
            name = next_set(left, given)
            chosen = self.choosers[name].next(history.look(name), step)
            if chosen is not None:
                row, note = chosen
                return Pick(data_set=name, row=row, note={**note, **({"ended": ended} if ended else {})})
            ended.append(name)
            del left[name]
            given = dict.fromkeys(left, 0)  # shares of the rest count from here
        return None
