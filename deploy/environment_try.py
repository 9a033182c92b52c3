"""Plays one sample of an environment with answers from the shell, without a run and without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from rollout_server.environment_config import EnvironmentConfig
from rollout_server.environments.hosts import host_of
from rollout_server.environments.interface import Action, Message, Step, Task


async def played(config: EnvironmentConfig, task: Task, answers: Sequence[str]) -> AsyncIterator[str]:
    """A line for all that is said, and for each answer what it earned.

    Raises ValueError for an environment that cannot be loaded, EnvironmentFailure where it fails.
    """
    host = host_of(config)
    try:
        await host.check()
        session = await host.open()
        try:
            for words in _said(await session.reset(task)):
                yield words
            total, given, turn = 0.0, False, -1
            for turn, text in enumerate(answers):
                step = await session.step(Action(text=text, turn=turn))
                yield f"answer {turn}: {text}  ->  {_earned(step)}"
                total, given = total + (step.reward or 0.0), given or step.reward is not None
                if step.done:
                    break
                for words in _said(step.observation):  # type: ignore[arg-type]  # a checked step's observation is messages
                    yield words
            if left := len(answers) - turn - 1:
                yield f"{left} of the answers came after its end"
            yield f"reward {total:g}" if given else "no reward: the reward server would be asked"
        finally:
            await session.close()
    finally:
        await host.stop()


def _said(messages: Sequence[Message]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def _earned(step: Step) -> str:
    parts = f" ({', '.join(f'{name} {value:g}' for name, value in step.parts.items())})" if step.parts else ""
    return f"{'no reward' if step.reward is None else f'reward {step.reward:g}'}{parts}, {'done' if step.done else 'goes on'}"
