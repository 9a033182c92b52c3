"""A fresh corner of a store that outlives its users: torchrun's agent keeps one store over all restarts of its workers.

Keys of an earlier round are still there (torch 2.13 puts nothing between the rounds), so a group would be told addresses of dead
processes. TORCHELASTIC_RESTART_COUNT does not tell rounds apart: it differs between the machines of one round. So rank 0 names
the round, every rank answers with a token of its own, and only a round whose closing lists that token is this one.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

_POLL_S = 0.05
_NAME = "headrace/round"


def fresh(store: Store, *, rank: int, size: int, timeout: timedelta) -> Store:
    """The part of the store that belongs to this round, the same on all ranks. Raises TimeoutError or torch's own when ranks are missing."""
    name = _open_round(store, size, timeout) if rank == 0 else _join_round(store, rank, timeout)
    return PrefixStore(name, store)


def _open_round(store: Store, size: int, timeout: timedelta) -> str:
    name = f"headrace/{time.time_ns()}"
    store.set(_NAME, name)
    answers = [f"{name}/{rank}" for rank in range(1, size)]
    if answers:
        store.wait(answers, timeout)
    store.set(f"{name}/closed", ",".join(store.get(answer).decode() for answer in answers))
    return name


def _join_round(store: Store, rank: int, timeout: timedelta) -> str:
    token, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    answered = ""
    while time.monotonic() < end:
        name = store.get(_NAME).decode() if store.check([_NAME]) else ""
        if name and name != answered:
            store.set(f"{name}/{rank}", token)
            answered = name
        if name and store.check([f"{name}/closed"]) and token in store.get(f"{name}/closed").decode().split(","):
            return name
        time.sleep(_POLL_S)
    raise TimeoutError(f"rank {rank}: rank 0 opened no round within {timeout.total_seconds():.0f} s")
