"""Scores that samples of one prompt get from being compared with each other. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reward_server.outcome import Outcome, Scored, Unscored


def ranked(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Each score by its rank among those scored, from 0 for the lowest to 1 for the highest; equal ones share the mean of their ranks.

    One alone gets 1/2. Unscored ones stay so. Part: score, the number that was ranked.
    Example: 3, 9, 3 gives 1/4, 1, 1/4: ranks (0 + 1) / 2, 2, (0 + 1) / 2, divided by 2.
    """
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Scored)]
    return tuple(Scored(value=_rank(outcome.value, values), parts={"score": outcome.value}) if isinstance(outcome, Scored) else outcome for outcome in outcomes)


def _rank(value: float, values: Sequence[float]) -> float:
    if len(values) == 1:
        return 0.5
    lower, equal = sum(each < value for each in values), sum(each == value for each in values)
    return (lower + (equal - 1) / 2) / (len(values) - 1)


def pairs(size: int, opponents: int) -> list[tuple[int, int]]:
    """Who meets whom, each pair once: everybody (opponents 0, or as many as there are), or the next ones in a ring, so that all meet equally many.

    `opponents` is even where it is fewer than all: half of them lie ahead in the ring, half behind. Example: size 5, opponents 2: (0, 1), (1, 2), (2, 3), (3, 4), (0, 4).
    """
    if opponents == 0 or opponents >= size - 1:
        return [(first, second) for first in range(size) for second in range(first + 1, size)]
    found = {tuple(sorted((first, (first + step) % size))) for step in range(1, opponents // 2 + 1) for first in range(size)}
    return sorted((first, second) for first, second in found)


def win_shares(size: int, games: Mapping[tuple[int, int], Outcome]) -> tuple[Outcome, ...]:
    """The mean result of each sample's games; games[i, j] is how far i beat j, 0 to 1, or why nobody knows.

    A sample of whose games fewer than half could be judged is unscored, with the first reason. Parts: num_games, num_lost_games (not judged).
    Example: games (0, 1): 1, (0, 2): 1/2, (1, 2): 0 give 3/4, 0, 3/4.
    """
    results: list[list[float]] = [[] for _ in range(size)]
    failed: list[list[Unscored]] = [[] for _ in range(size)]
    for (first, second), outcome in games.items():
        if isinstance(outcome, Unscored):
            failed[first].append(outcome)
            failed[second].append(outcome)
        else:
            results[first].append(outcome.value)
            results[second].append(1.0 - outcome.value)
    return tuple(_share(won, lost) for won, lost in zip(results, failed, strict=True))


def _share(results: Sequence[float], failed: Sequence[Unscored]) -> Outcome:
    if failed and len(results) < len(failed):
        return Unscored(f"{len(failed)} of {len(results) + len(failed)} comparisons could not be judged; the first: {failed[0].detail}", failed[0].reason)
    value = sum(results) / len(results) if results else 0.5  # alone: nobody to beat
    return Scored(value=value, parts={"num_games": float(len(results)), "num_lost_games": float(len(failed))})


def game(forth: Outcome, back: Outcome | None) -> Outcome:
    """How far the first beat the second, from one question or from both orders, whose mean takes the judge's liking for a place out.

    Raises nothing: a result outside [0, 1] is unscored.
    """
    if isinstance(forth, Unscored):
        return forth
    if isinstance(back, Unscored):
        return back
    values = [forth.value] if back is None else [forth.value, 1.0 - back.value]
    if not all(0.0 <= value <= 1.0 for value in values):
        return Unscored(f"a comparison gave {forth.value:g}, and must give 0 (the other is better) to 1 (this one is)", "error")
    return Scored(value=sum(values) / len(values))
