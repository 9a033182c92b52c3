"""What all ranks make of something that each of them tried, told through the store: a rank that never comes costs a deadline, not a collective.

    every rank    says how its part went                                   NAME/RANK
    rank 0        hears all of them, or stops at its deadline              NAME/verdict
    every rank    hears rank 0's verdict

Keys are asked for and never waited for, since a wait holds the store's connection, which training may need meanwhile.
"""

from __future__ import annotations

import time

from torch.distributed import Store

WELL = "well"
_ASK_S = 0.02
_LONGEST_ASK_S = 0.2
_OTHERS_S = 15.0  # after a failure: for the other ranks to say what they saw of it
_VERDICT_S = 30.0  # beyond rank 0's deadline, for its verdict to arrive


class Accord:
    """One rank's side. Example: `accord.say("3/written", ""); failure = accord.verdict("3/written", limit_s=60)`"""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        """store: the same on all ranks, and of this accord alone. A name is used once."""
        self._store, self._rank, self._size = store, rank, size
        self._heard: list[str] = []  # names that all ranks are done with

    def say(self, name: str, failure: str) -> None:
        """How this rank's part went; "" is well. Returns at once."""
        self._store.set(f"{name}/{self._rank}", failure or WELL)

    def verdict(self, name: str, *, limit_s: float) -> str:
        """"" when every rank said well within limit_s of rank 0's call, else who did not and why; the same on all ranks.

        A rank that hears nothing of rank 0 calls that a failure too.
        """
        if self._rank == 0:
            verdict = self._judge(name, time.monotonic() + limit_s)
            self._store.set(f"{name}/verdict", verdict or WELL)
            return verdict
        wait_s = limit_s + _OTHERS_S + _VERDICT_S
        if not self._ask([f"{name}/verdict"], time.monotonic() + wait_s):
            return f"rank 0 gave no verdict within {wait_s:.0f} s"
        said = self._store.get(f"{name}/verdict").decode()
        return "" if said == WELL else said

    def _judge(self, name: str, end: float) -> str:
        failures: list[str] = []
        for rank in range(self._size):
            if not self._ask([f"{name}/{rank}"], end):
                failures.append(f"rank {rank} did not answer in time")
            elif (said := self._store.get(f"{name}/{rank}").decode()) != WELL:
                failures.append(f"rank {rank}: {said}")
            if failures:
                end = min(end, time.monotonic() + _OTHERS_S)
        if not failures:
            self._forget(name)
        return "; ".join(failures)

    def _forget(self, name: str) -> None:
        """Whoever speaks of this name has read the verdicts before it."""
        for old in self._heard:
            for key in (*range(self._size), "verdict"):
                self._store.delete_key(f"{old}/{key}")
        self._heard = [name]

    def _ask(self, keys: list[str], end: float) -> bool:
        pause_s = _ASK_S
        while not self._store.check(keys):
            if time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_ASK_S)
        return True
