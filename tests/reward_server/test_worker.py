"""The inside of a scorer process, over a socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from reward_server import channel
from reward_server.worker import _Scorer

USE = "tests.reward_server.user_functions"


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, channel.Inbox]]:
    """The service's end and the process's inbox."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        yield ours, channel.Inbox(theirs)


def batch(*calls: tuple[int, str], scorer: int = 0) -> bytes:
    return channel.encode([scorer, [[seq, "", completion, b""] for seq, completion in calls]])


def answered(ours: socket.socket, count: int) -> list[int]:
    """Numbers of the answered calls, in order; signs of life left out."""
    unpacker = channel.answers()
    seqs: list[int] = []
    while len(seqs) < count:
        unpacker.feed(ours.recv(65536))
        seqs += [message[0] for message in unpacker if message]
    return seqs


async def test_async_batches_that_arrive_in_one_read_all_begin_at_once(line: tuple[socket.socket, channel.Inbox]) -> None:
    ours, inbox = line
    scorer = _Scorer(inbox, 0, "waits", f"{USE}:waits", {}, 5.0)
    ours.sendall(batch((1, "1")) + batch((2, "0")) + batch((3, "0.1")))
    _, items = next(inbox.all())
    await asyncio.to_thread(scorer.answer_all, items)
    assert answered(ours, 3) == [2, 3, 1]


async def test_a_batch_of_another_scorer_stays_where_it_is(line: tuple[socket.socket, channel.Inbox]) -> None:
    ours, inbox = line
    scorer = _Scorer(inbox, 0, "waits", f"{USE}:waits", {}, 5.0)
    ours.sendall(batch((1, "0.1")) + batch((2, "0"), scorer=1))
    received = inbox.all()
    _, items = next(received)
    await asyncio.to_thread(scorer.answer_all, items)
    assert answered(ours, 1) == [1]
    assert next(received) == [1, [[2, "", "0", b""]]]


async def test_cancelled_calls_of_both_kinds_are_answered_without_being_made(line: tuple[socket.socket, channel.Inbox]) -> None:
    ours, inbox = line
    received = inbox.all()
    for index, use in enumerate(("waits", "sleeps")):
        scorer = _Scorer(inbox, index, use, f"{USE}:{use}", {}, 20.0)
        ours.sendall(batch((1, "0.2"), (2, "15"), (3, "0"), scorer=index) + channel.encode([channel.CANCEL, [2]]))
        _, items = next(received)
        await asyncio.wait_for(asyncio.to_thread(scorer.answer_all, items), 20)
        assert sorted(answered(ours, 3)) == [1, 2, 3]
