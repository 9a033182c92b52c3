"""What a rollout server and an environment process say to each other: msgpack arrays over one socket pair. Pure.

Server to process: first `[SCHEMA, use, options, agent, memory_mb]`, then calls `[number, method, session, *arguments]`:
    reset, [prompt, fields, seed] · step, [text, turn, cut] · run, [prompt, fields, seed], base_url, api_key · close
Process to server: first `[True, [birth]]` or `[False, what is wrong]`, then `[number, None, answer]` or `[number, reason, detail]` a call.
The answer of `close` is what the process holds then, as `birth` is what it held before its first session: [descriptors, threads, children].
"""

from __future__ import annotations

from typing import Any

from rollout_server.environments.interface import (
    Action,
    EnvironmentFailure,
    Step,
    Task,
    checked_observation,
    checked_reward,
    checked_step,
)

SCHEMA = 1
MAX_BYTES = 64 << 20  # of one message


def task_out(task: Task) -> list[Any]:
    return [task.prompt, dict(task.fields), task.seed]


def task_in(said: list[Any]) -> Task:
    prompt, fields, seed = said
    return Task(prompt=prompt, fields=fields, seed=seed)


def action_out(action: Action) -> list[Any]:
    return [action.text, action.turn, action.cut]


def action_in(said: list[Any]) -> Action:
    text, turn, cut = said
    return Action(text=text, turn=turn, cut=cut)


def step_out(step: Step) -> list[Any]:
    """Of a checked step."""
    return [step.observation, step.reward, step.done, dict(step.parts)]


def step_in(said: Any) -> Step:
    """Checked again: what a process says is as little to be trusted as the code in it. Raises EnvironmentFailure."""
    try:
        observation, reward, done, parts = said
        return checked_step(Step(observation=observation, reward=reward, done=done, parts=parts))
    except (ValueError, TypeError) as error:
        raise EnvironmentFailure("bad_answer", str(error)) from None


def observation_in(said: Any) -> list[dict[str, str]]:
    """Raises EnvironmentFailure."""
    try:
        return checked_observation(said)
    except ValueError as error:
        raise EnvironmentFailure("bad_answer", str(error)) from None


def earned(said: Any) -> float | None:
    """What an agent says that it earned; None: it does not say. Raises EnvironmentFailure."""
    try:
        return None if said is None else checked_reward(said)
    except ValueError as error:
        raise EnvironmentFailure("bad_answer", str(error)) from None
