"""One measured run: ask the base model, train, ask what is served then.

    reward ──ready──┐
    replica ─ready──┴▶ questions (before) ─▶ start the learner ─▶ its exit ─▶ replica at the last version ─▶ questions (after)

The replica is the one that was trained with, so "after" measures weights that were pushed and not only saved. One that was lost when the learner
left can be given nothing any more: it is started anew on the saved weights, and that is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from deploy.backends import check
from deploy.demo.evaluate import Evaluation, Examiner, Question
from deploy.fleet import Fleet
from deploy.keeper import Keeper
from deploy.launch import Backend, fleet_of
from deploy.processes import LEARNER
from deploy.progress import read_all, surviving
from deploy.schema import RunFile
from deploy.services import write_atomically
from deploy.telling import tell_steps
from learner.supervisor import claimed
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.rpc import channel, deadline_s

START_S = 600.0  # for imports and loading on a busy machine
LOST_S = 300.0  # for a replica or a reward server that was lost while it was asked to be back
RETRY_S = 2.0
LAST_PUSH_S = 60.0  # for a replica to load what the learner pushed before it left
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
REWARD, REPLICA = "reward-0", "rollout-0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Another way to ask the base model, to tell what training could have taught at most by form alone.

    Example: `Baseline(name="longer", questions=questions, max_new_tokens=48)`
    """

    name: str
    questions: tuple[Question, ...]
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What is asked before and after, and how.

    Example: `Lesson(questions=questions, scorer="answer", max_new_tokens=12, stop_token_ids=(2,))`
    """

    questions: tuple[Question, ...]
    scorer: str
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    baselines: tuple[Baseline, ...] = ()

    def examiner(self, rollout: str, reward: str, max_new_tokens: int) -> Examiner:
        """Asks a replica, has a reward server score; host:port of both."""
        return Examiner(
            rollout=rollout,
            reward=reward,
            scorer=self.scorer,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """Result of a session.

    Example: `Taught(before=before, after=after, baselines={}, minutes=8.1, steps=41)`
    """

    before: Evaluation
    after: Evaluation
    baselines: dict[str, Evaluation]
    minutes: float  # wall time of the whole session, all evaluations included
    steps: int


def teach(run: RunFile, lesson: Lesson, on_event: Callable[[str], None], backend: Backend = "local") -> Taught:
    """Trains `run` to its end, with both evaluations. An interrupted session of the same run folder is taken up again.

    Raises RuntimeError when the run fails, ValueError for a user's mistake that only a service could find.
    """
    check(run, backend)
    with claimed(run.run_dir, "launcher"), fleet_of(backend)(run, on_event) as fleet:
        return asyncio.run(_teach(run, lesson, fleet, on_event))


async def _teach(run: RunFile, lesson: Lesson, fleet: Fleet, on_event: Callable[[str], None]) -> Taught:
    started = time.monotonic()
    ask = _Once(run.run_dir, on_event)

    def examiner(max_new_tokens: int) -> Examiner:
        return lesson.examiner(fleet.where(REPLICA).address, fleet.where(REWARD).address, max_new_tokens)

    async with fleet.keeper() as keeper:
        fleet.start(*fleet.first, held=(LEARNER,))
        for name in (REWARD, REPLICA):
            await keeper.ready(name, limit_s=START_S)
        before = await keeper.until(ask("before", lambda: examiner(lesson.max_new_tokens), lesson.questions))
        baselines = {}
        for each in lesson.baselines:
            baselines[each.name] = await keeper.until(ask(f"baseline-{each.name}", partial(examiner, each.max_new_tokens), each.questions))
        await _train(keeper, fleet, run, on_event)
        if not await _until_current(fleet, final_version(run.run_dir), on_event, limit_s=LAST_PUSH_S):
            await _serve_saved(fleet, run, on_event)
        after = await ask("after", lambda: examiner(lesson.max_new_tokens), lesson.questions)
    minutes = (time.monotonic() - started) / 60
    return Taught(before=before, after=after, baselines=baselines, minutes=minutes, steps=final_step(run.run_dir))


def final_step(run_dir: Path) -> int:
    """Steps that the run has made."""
    metrics = surviving(read_all(run_dir / "metrics.jsonl"))
    return int(metrics[-1]["step"]) if metrics else 0


def final_version(run_dir: Path) -> int:
    """Policy version after the last step."""
    metrics = surviving(read_all(run_dir / "metrics.jsonl"))
    return int(metrics[-1]["version"]) if metrics else 0


async def _train(keeper: Keeper[Any], fleet: Fleet, run: RunFile, on_event: Callable[[str], None]) -> None:
    fleet.release(LEARNER)
    steps = asyncio.create_task(tell_steps(run, on_event))
    try:
        outcome = await keeper.outcome()
    finally:
        steps.cancel()
    outcome.check()
    if (step := final_step(run.run_dir)) < run.learner.steps:
        on_event(f"training ended at its limit of {run.learner.max_minutes:g} minutes, after step {step} of {run.learner.steps}")


async def _until_current(fleet: Fleet, version: int, on_event: Callable[[str], None], *, limit_s: float) -> bool:
    """Whether the replica has loaded `version` in time, wherever it is by now."""
    end, loaded = time.monotonic() + limit_s, -1
    while time.monotonic() < end:
        with contextlib.suppress(grpc.aio.AioRpcError, KeyError):  # it may be starting again, on another machine
            loaded = await _loaded_version(fleet.where(REPLICA).address)
        if loaded >= version:
            on_event(f"{REPLICA} serves version {loaded}")
            return True
        await asyncio.sleep(0.2)
    return False


async def _serve_saved(fleet: Fleet, run: RunFile, on_event: Callable[[str], None]) -> None:
    """The replica anew, on what the learner saved. Raises RuntimeError when it does not come up."""
    model = run.run_dir / "model"
    on_event(f"{REPLICA} was lost when the learner left, and has not its last version: it is started anew on the saved weights, {model}")
    process = next(each for each in fleet.first if each.name == REPLICA)
    await fleet.stop(REPLICA)
    fleet.start(replace(process, config={**process.config, "model": str(model.absolute())}, needs=()))
    if not await _until_current(fleet, 0, lambda _: None, limit_s=START_S):
        raise RuntimeError(f"{REPLICA} did not serve {model} within {START_S:.0f} s; its log says why")


async def _loaded_version(address: str) -> int:
    async with channel(address) as open_channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(open_channel)
        status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=deadline_s("GetStatus"))
    return int(status.loaded_version)


class _Once:
    """Evaluations kept as files, so that a resumed session does not ask again."""

    def __init__(self, run_dir: Path, on_event: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._on_event = on_event

    async def __call__(self, name: str, examiner: Callable[[], Examiner], questions: tuple[Question, ...]) -> Evaluation:
        """examiner: with the addresses of now. Raises grpc.aio.AioRpcError when services that were lost have not come back within LOST_S."""
        file = self._run_dir / "evaluations" / f"{name}.jsonl"
        if file.is_file():
            return Evaluation.of_lines(file.read_text())
        started = time.monotonic()
        evaluation = await self._asked(name, examiner, questions)
        write_atomically(file, evaluation.to_lines())
        self._on_event(
            f"{name}: accuracy {evaluation.accuracy:.3f} (standard error {evaluation.standard_error:.3f}) on {len(questions)} held-out tasks "
            f"in {time.monotonic() - started:.0f} s; for instance {[each.text for each in evaluation.answered[:3]]}"
        )
        return evaluation

    async def _asked(self, name: str, examiner: Callable[[], Examiner], questions: tuple[Question, ...]) -> Evaluation:
        end = time.monotonic() + LOST_S
        while True:
            try:
                return await examiner().ask(questions)
            except grpc.aio.AioRpcError as error:
                if error.code() not in LOST or time.monotonic() > end:
                    raise
                self._on_event(f"{name}: a service was lost while it was asked ({error.code().name}); all questions are asked again")
                await asyncio.sleep(RETRY_S)
