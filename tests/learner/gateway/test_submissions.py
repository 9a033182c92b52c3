"""Receipts of messages: when they come, and together with whose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from learner.gateway.books import Books
from learner.gateway.catalog import Shelf
from learner.gateway.ledger import Ledger
from learner.gateway.submissions import Receipt, Submissions
from learner.gateway.terms import Limits
from learner.gateway.unscored import UnscoredShare
from protos.arrays import pack_ids
from protos.learner.v1alpha1 import learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.learner.gateway.gateway_harness import sample


class HeldBooks:
    """Books whose disk is slow: each message's future is set by the test."""

    def __init__(self) -> None:
        self.ledger = Ledger(Limits(groups_per_step=4, group_size=8, max_staleness=1))
        self.ledger.publish(0)
        self.ledger.open_group(holder="a", lease_id="l", now=0.0, lapse_at=1.0, prompt_id="p", prompt_row=0)
        self.journal = self
        self.batches: list[tuple[list[int], asyncio.Future[Any]]] = []
        self.unscored = UnscoredShare(most=None)

    async def drained(self) -> None:
        pass

    def commit_samples(self, taken: Sequence[tuple[tuple[str, int], Any, bytes]]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.batches.append(([index for (_, index), _, _ in taken], future))
        return future


LEASE = learner_pb2.Lease(group_id="g00000000", prompt_ids=pack_ids([4, 6]))


async def served(messages: list[list[int]], *, bad: int | None = None) -> tuple[HeldBooks, list[list[Receipt]], asyncio.Task[None]]:
    """An intake that has taken messages of samples with these indices; `bad` has no spans."""
    books, answers = HeldBooks(), list[list[Receipt]]()
    shelf = Shelf()
    shelf.wait = None  # type: ignore[assignment,method-assign]
    shelf.catalog = cast("Any", type("Prompts", (), {"ids": [LEASE.prompt_ids.data], "max_new_tokens": [3]}))
    intake = Submissions(cast("Books", books), shelf, run_id="r", vocabulary=10)

    async def sent() -> AsyncIterator[tuple[str, list[trajectory_pb2.Trajectory]]]:
        for indices in messages:
            yield "r", [sample(LEASE, index, 1) if index != bad else sample(LEASE, index, 1, spans=[]) for index in indices]

    async def write(receipts: list[Receipt]) -> None:
        answers.append(list(receipts))

    serving = asyncio.create_task(intake.serve(sent(), write))
    await asyncio.sleep(0.01)
    return books, answers, serving


def indices(answers: list[list[Receipt]]) -> list[list[int]]:
    return [[receipt.sample_index for receipt in answer] for answer in answers]


async def test_messages_that_are_on_the_disk_share_an_answer_and_others_wait() -> None:
    books, answers, serving = await served([[0, 1], [2, 3], [4, 5]])
    assert [batch for batch, _ in books.batches] == [[0, 1], [2, 3], [4, 5]] and not answers
    books.batches[1][1].set_result(None)  # the second alone: receipts keep the order of submission
    await asyncio.sleep(0.01)
    assert not answers
    books.batches[0][1].set_result(None)
    await asyncio.sleep(0.01)
    assert indices(answers) == [[0, 1, 2, 3]]
    books.batches[2][1].set_result(None)
    await serving
    assert indices(answers) == [[0, 1, 2, 3], [4, 5]]


async def test_a_message_of_one_sample_has_an_answer_of_its_own() -> None:
    books, answers, serving = await served([[0], [1], [2, 3]])
    for _, future in books.batches:
        future.set_result(None)
    await serving
    assert indices(answers) == [[0], [1], [2, 3]]


async def test_what_came_before_a_malformed_sample_is_journaled_and_answered() -> None:
    books, answers, serving = await served([[0, 1, 2, 3]], bad=2)
    assert [batch for batch, _ in books.batches] == [[0, 1]]
    books.batches[0][1].set_result(None)
    with pytest.raises(ValueError, match="spans end at 0"):
        await serving
    assert indices(answers) == [[0, 1]]
