"""A measured run whose services are lost while they are asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from deploy.demo import session
from deploy.demo.evaluate import Answered, Evaluation, Question
from deploy.processes import Process, Where, configured

QUESTION = Question(prompt="1 + 1 =", answer="2")
RIGHT = Evaluation(answered=(Answered(prompt="1 + 1 =", answer="2", text="2", score=1.0, version=0, prompt_ids=(1,)),))


class AFleet:
    """One replica, which never gets the last version; started anew it answers."""

    def __init__(self, run_dir: Path) -> None:
        self.first = [Process(name="rollout-0", role="rollout", config={"model": "base"}, log=run_dir / "log", wants="", wants_metrics="", needs=("learner", "reward-0"))]
        self.done: list[Any] = []

    async def stop(self, name: str) -> None:
        self.done.append(name)

    def start(self, process: Process) -> None:
        self.done.append(process)

    def where(self, name: str) -> Where:
        return Where(address="new" if len(self.done) == 2 else "old", metrics="")


async def test_a_replica_that_was_lost_when_the_learner_left_serves_the_saved_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loaded(address: str) -> int:
        if address == "old":
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return 0  # of weights that no learner gave

    monkeypatch.setattr(session, "_loaded_version", loaded)
    fleet, told = AFleet(tmp_path), list[str]()
    run: Any = SimpleNamespace(run_dir=tmp_path)
    assert not await session._until_current(fleet, 6, told.append, limit_s=0.3)  # type: ignore[arg-type]
    await session._serve_saved(fleet, run, told.append)  # type: ignore[arg-type]
    stopped, started = fleet.done
    assert stopped == "rollout-0" and started.config == {"model": str(tmp_path / "model")} and told == [f"rollout-0 was lost when the learner left, and has not its last version: it is started anew on the saved weights, {tmp_path}/model"]
    assert configured(started, Where(address="a", metrics=""), {}) == {"model": str(tmp_path / "model"), "address": "a", "metrics_address": ""}  # no learner is looked for


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
