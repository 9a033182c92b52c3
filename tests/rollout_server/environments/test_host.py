"""Environments in their processes: what each way to be bad comes to, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_server.environment_config import EnvironmentConfig
from rollout_server.environments.host import HostedSession, ProcessHost
from rollout_server.environments.interface import Action, EnvironmentFailure, Task
from rollout_server.environments.process import MARK

HERE = "tests.rollout_server.environments.plugins"
Make = Callable[..., ProcessHost]


def marked() -> list[int]:
    """Processes of environments that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if f"{MARK}=".encode() in environ and f"STARTED_BY={os.getpid()}".encode() in environ:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setenv("STARTED_BY", str(os.getpid()))
    made: list[ProcessHost] = []
    before = set(marked())

    def make(use: str = "Bad", **values: Any) -> ProcessHost:
        made.append(ProcessHost(EnvironmentConfig(name="e", use=use if ":" in use or use in ("calculator", "tower_of_hanoi") else f"{HERE}:{use}", **{"step_timeout_s": 0.5, "reset_timeout_s": 0.5, **values})))
        return made[-1]

    yield make
    for each in made:
        await each.stop()
    assert not set(marked()) - before


async def played(host: ProcessHost, **fields: Any) -> tuple[list[Any], EnvironmentFailure | None]:
    """What a session of three turns said, and how it failed."""
    said: list[Any] = []
    session = await host.open()
    try:
        said.append(await session.reset(Task(prompt="go", fields=fields, seed=1)))
        for turn in range(3):
            step = await session.step(Action(text=f"a{turn}", turn=turn))
            said.append(step)
            if step.done:
                break
        return said, None
    except EnvironmentFailure as failure:
        return said, failure
    finally:
        await session.close()


async def test_a_good_environment_is_played_and_its_process_serves_the_next_sample(host: Make) -> None:
    one = host("Echo", options={"turns": 2})
    said, failure = await played(one)
    assert failure is None and said[0] == [{"role": "user", "content": "go"}]
    assert [(step.observation, step.reward, step.done) for step in said[1:]] == [([{"role": "user", "content": "[a0]"}], 1.0, False), ([], 1.0, True)]
    await played(one)
    assert one.tally["closed"] == 2 and one.num_processes == len(marked()) == 1 and one.num_sessions == 0


@pytest.mark.parametrize(
    ("how", "when", "reason", "words"),
    [
        ("hang", "step", "timeout", "no answer to step within 0.5 s"),
        ("hang", "reset", "timeout", "no answer to reset within 0.5 s"),
        ("raise", "step", "error", "RuntimeError: the world is broken"),
        ("raise", "reset", "error", "RuntimeError: the world is broken"),
        ("exit", "step", "died", "its process ended"),
        ("sys_exit", "step", "error", "SystemExit: 3"),
        ("garbage", "step", "bad_answer", "step answers a Step, got object"),
        ("nan", "step", "bad_answer", "a reward is a finite number, got nan"),
        ("number", "reset", "bad_answer", "an observation is a text or a list of messages, got int"),
        ("memory", "step", "error", "MemoryError"),
    ],
)
async def test_a_bad_environment_fails_by_its_type(host: Make, how: str, when: str, reason: str, words: str) -> None:
    one = host()
    said, failure = await played(one, how=how, when=when)
    assert failure is not None and (failure.reason, words in failure.detail) == (reason, True), failure
    assert len(said) == (0 if when == "reset" else 1)
    assert one.tally[reason] == 1 and one.num_sessions == 0 and one.num_processes == 0  # a process that failed plays nothing else
    assert (await played(one))[1] is None  # and the next sample is played


@pytest.mark.parametrize("how", ["leak_children", "leak_files", "leak_threads"])
async def test_what_is_left_behind_is_counted_and_ended_with_its_process(host: Make, how: str) -> None:
    one = host()
    before = set(marked())
    said, failure = await played(one, how=how)
    assert failure is None and said[-1].done
    assert one.tally["leaked"] == 1 and one.tally["closed"] == 1 and one.num_processes == 0
    assert not set(marked()) - before


async def test_one_that_cannot_close_is_counted_and_frees_its_place(host: Make) -> None:
    one = host(max_sessions=1)
    _, failure = await played(one, how="hang", when="close")
    assert failure is None and one.tally["timeout"] == 1 and one.num_processes == 0
    assert (await asyncio.wait_for(played(one, how="print"), 20))[1] is None


async def test_in_a_shared_process_the_others_are_lost_and_say_so(host: Make) -> None:
    one = host(sessions_per_process=8)
    bystander: HostedSession = await one.open()
    await bystander.reset(Task(prompt="go", fields={}, seed=1))
    _, failure = await played(one, how="hang")
    assert failure is not None and failure.reason == "timeout"
    with pytest.raises(EnvironmentFailure, match="lost: its process was killed"):
        await bystander.step(Action(text="a", turn=0))
    await bystander.close()
    assert one.tally["timeout"] == one.tally["lost"] == 1 and one.num_processes == 0


async def test_sessions_beyond_the_limit_wait_for_a_place(host: Make) -> None:
    one = host("Echo", max_sessions=2)
    first, second = await one.open(), await one.open()
    third = asyncio.create_task(one.open())
    await asyncio.sleep(0.05)
    assert not third.done() and one.num_processes == 2
    await first.close()
    await (await asyncio.wait_for(third, 20)).close()
    await second.close()


@pytest.mark.parametrize(("use", "words"), [(f"{HERE}:Missing", "has no 'Missing'; it has "), ("no_such_module:E", "module 'no_such_module' was not found; start in the folder that holds it"), (f"{HERE}:hopeless", "RuntimeError: no such luck")])
async def test_what_cannot_be_loaded_is_said_in_one_line_before_the_first_sample(host: Make, use: str, words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        await host(use).check()
    assert words in str(refusal.value) and "\n" not in str(refusal.value) and "environment e" in str(refusal.value)


async def test_no_descriptor_is_left_in_the_server(host: Make) -> None:
    one = host()
    await played(one, how="raise")
    before = len(os.listdir("/proc/self/fd"))
    for how in ("raise", "exit", "hang", "garbage"):
        await played(one, how=how)
    await one.stop()
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before
