"""One measured run: ask the base model, train, ask what is served then.

    reward ──ready──┐
    replica ─ready──┴▶ questions (before) ─▶ start the learner ─▶ its exit ─▶ replica at the last version ─▶ questions (after)

The replica is the one that was trained with, so "after" measures weights that were pushed and not only saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.demo.evaluate import Evaluation, Examiner, Question
from deploy.launch import tell_steps
from deploy.local import Local
from deploy.progress import read_all, surviving
from deploy.schema import RunFile
from deploy.services import Service, local_services, write_atomically
from learner.supervisor import claimed
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.rpc import channel, deadline_s

START_S = 600.0  # for imports and loading on a busy machine
LAST_PUSH_S = 60.0


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

    def examiner(self, rollout: Service, reward: Service, max_new_tokens: int) -> Examiner:
        """Asks a replica, has a reward server score."""
        return Examiner(
            rollout=rollout.address,
            reward=reward.address,
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


async def teach(run: RunFile, lesson: Lesson, on_event: Callable[[str], None]) -> Taught:
    """Trains `run` to its end, with both evaluations. An interrupted session of the same run folder is taken up again.

    Raises RuntimeError when the run fails, ValueError for a user's mistake that only a service could find.
    """
    with claimed(run.run_dir, "launcher"):
        return await _teach(run, lesson, on_event)


async def _teach(run: RunFile, lesson: Lesson, on_event: Callable[[str], None]) -> Taught:
    started = time.monotonic()
    services = {service.name: service for service in local_services(run)}
    reward, replica, learner = services["reward-0"], services["rollout-0"], services["learner"]
    ask = _Once(run.run_dir, on_event)
    examiner = lesson.examiner(replica, reward, lesson.max_new_tokens)
    async with Local(on_event=on_event) as local:
        for service in services.values():
            if service is not learner:
                local.start(service)
        for service in (reward, replica):
            await local.ready(service.name, limit_s=START_S)
        before = await local.until(ask("before", examiner, lesson.questions))
        baselines = {}
        for each in lesson.baselines:
            longer = lesson.examiner(replica, reward, each.max_new_tokens)
            baselines[each.name] = await local.until(ask(f"baseline-{each.name}", longer, each.questions))
        await _train(local, learner, run, on_event)
        await _until_current(replica, final_version(run.run_dir), on_event)
        after = await ask("after", examiner, lesson.questions)
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


async def _train(local: Local, learner: Service, run: RunFile, on_event: Callable[[str], None]) -> None:
    local.start(learner)
    steps = asyncio.create_task(tell_steps(run, on_event))
    try:
        outcome = await local.outcome()
    finally:
        steps.cancel()
    outcome.check()


async def _until_current(replica: Service, version: int, on_event: Callable[[str], None]) -> None:
    """Returns once the replica has loaded `version`. Raises RuntimeError when it has not within LAST_PUSH_S."""
    end = time.monotonic() + LAST_PUSH_S
    async with channel(replica.address) as open_channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(open_channel)
        while True:
            status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=deadline_s("GetStatus"))
            if status.loaded_version >= version:
                on_event(f"{replica.name} serves version {status.loaded_version}")
                return
            if time.monotonic() > end:
                raise RuntimeError(f"{replica.name} serves version {status.loaded_version}, not the last one, {version}, {LAST_PUSH_S:.0f} s after training; see {replica.log}")
            await asyncio.sleep(0.2)


class _Once:
    """Evaluations kept as files, so that a resumed session does not ask again."""

    def __init__(self, run_dir: Path, on_event: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._on_event = on_event

    async def __call__(self, name: str, examiner: Examiner, questions: tuple[Question, ...]) -> Evaluation:
        file = self._run_dir / "evaluations" / f"{name}.jsonl"
        if file.is_file():
            return Evaluation.of_lines(file.read_text())
        started = time.monotonic()
        evaluation = await examiner.ask(questions)
        write_atomically(file, evaluation.to_lines())
        self._on_event(
            f"{name}: accuracy {evaluation.accuracy:.3f} (standard error {evaluation.standard_error:.3f}) on {len(questions)} held-out tasks "
            f"in {time.monotonic() - started:.0f} s; for instance {[each.text for each in evaluation.answered[:3]]}"
        )
        return evaluation
