"""A measured run whose services are lost while they are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.demo import session
from deploy.demo.evaluate import Answered, Evaluation, Question

QUESTION = Question(prompt="1 + 1 =", answer="2")
RIGHT = Evaluation(answered=(Answered(prompt="1 + 1 =", answer="2", text="2", score=1.0, version=0, prompt_ids=(1,)),))


class AnExaminer:
    """Fails as often as it is told to."""

    def __init__(self, fails: list[grpc.StatusCode]) -> None:
        self.fails = fails

    async def ask(self, questions: tuple[Question, ...]) -> Evaluation:
        if self.fails:
            raise grpc.aio.AioRpcError(self.fails.pop(), grpc.aio.Metadata(), grpc.aio.Metadata())
        return RIGHT


async def test_questions_are_asked_again_when_a_node_is_lost_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RETRY_S", 0.0)
    told: list[str] = []
    examiner: Any = AnExaminer([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
    asked = await session._Once(tmp_path, told.append)("before", lambda: examiner, (QUESTION,))
    assert asked == RIGHT and Evaluation.of_lines((tmp_path / "evaluations" / "before.jsonl").read_text()) == RIGHT
    assert told[0] == "before: a service was lost while it was asked (CANCELLED); all questions are asked again" and len(told) == 3


async def test_a_refusal_is_not_asked_again(tmp_path: Path) -> None:
    examiner: Any = AnExaminer([grpc.StatusCode.INVALID_ARGUMENT])
    with pytest.raises(grpc.aio.AioRpcError):
        await session._Once(tmp_path, lambda _: None)("before", lambda: examiner, (QUESTION,))
    assert not (tmp_path / "evaluations").exists()
