"""How many groups may be open, and which may enter the next batch. The bound on staleness rests on these two functions."""

from __future__ import annotations

from collections.abc import Iterable


def max_open(*, groups_per_step: int, max_staleness: int, window: int) -> int:
    """(S + 1) * P - (W - 1): open groups at which no further one is opened. Proof in docs/staleness.md.

    Of the groups that can enter a batch before a given one, (S + 1) * P - W were open with it and W - 1 are younger: together one
    less than S + 1 batches hold.
    Raises ValueError when fewer than P could be open: no batch would ever be full.
    """
    if window > max_staleness * groups_per_step + 1:
        raise ValueError(
            f"staleness.window={window} is more than max_staleness * groups_per_step + 1 = {max_staleness} * {groups_per_step} + 1 = "
            f"{max_staleness * groups_per_step + 1}: fewer groups could be open than a batch needs; use a smaller window"
        )
    return (max_staleness + 1) * groups_per_step - (window - 1)


def choose(open_groups: Iterable[tuple[int, bool]], *, num_groups: int, window: int) -> list[int]:
    """The groups that enter the next batch, in order of entry, at most `num_groups`.

    open_groups: (seq, complete) of every open group that is in no batch yet.
    They enter one at a time: the lowest complete seq below head + window, where head is the lowest seq still outside. For instance
    window 2 and 4 (incomplete), 5, 6: 5 enters; then 6 must wait, since 6 is not below 4 + 2.
    """
    outside = sorted(open_groups)
    entered: list[int] = []
    while outside and len(entered) < num_groups:
        position = _first_complete(outside, outside[0][0] + window)
        if position is None:
            break
        entered.append(outside.pop(position)[0])
    return entered


def _first_complete(outside: list[tuple[int, bool]], end_seq: int) -> int | None:
    for position, (seq, complete) in enumerate(outside):
        if seq >= end_seq:
            return None
        if complete:
            return position
    return None
