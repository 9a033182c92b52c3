"""Stacks of other processes, and that asking does them no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos import stacks

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import sys, time
from protos import stacks
{before}
def waits_for_godot():
    print("ready", flush=True)
    {wait}
waits_for_godot()
print("went on", flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []
    yield children
    for child in children:
        child.kill()
        child.wait(10)


def start(children: list[subprocess.Popen[str]], *, before: str = "stacks.answering()", wait: str = "sys.stdin.readline()", **environment: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", BLOCKED.format(before=before, wait=wait)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)})
    children.append(child)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def went_on(child: subprocess.Popen[str]) -> bool:
    out, _ = child.communicate("\n", timeout=20)
    return out == "went on\n" and child.returncode == 0


def test_a_process_that_waits_in_a_system_call_tells_where_and_goes_on(started: list[subprocess.Popen[str]]) -> None:
    child = start(started)
    for _ in range(20):
        (answer,) = stacks.ask([child.pid], limit_s=20)
        assert "waits_for_godot" in answer.text and answer.text.startswith("state ")
        assert answer.text.count("most recent call first") == 1  # of this question alone, not of those before
    assert went_on(child)


def test_a_process_that_never_lets_go_of_the_interpreter_answers_too(started: list[subprocess.Popen[str]]) -> None:
    child = start(started, before="import re; stacks.answering()", wait='re.match("(a+)+$", "a" * 40 + "b")')  # in C, for longer than any test
    (answer,) = stacks.ask([child.pid], limit_s=20)
    assert "waits_for_godot" in answer.text


def test_a_process_that_does_not_answer_is_never_signalled(started: list[subprocess.Popen[str]]) -> None:
    child = start(started, before="")  # the signal's default would end it
    (answer,) = stacks.ask([child.pid], limit_s=20)
    assert "not asked" in answer.text and "state" in answer.text
    assert went_on(child)


def test_a_fork_that_has_not_called_answering_is_not_signalled(started: list[subprocess.Popen[str]]) -> None:
    fork = "stacks.answering(); import os\nif os.fork(): os.wait(); sys.exit(0)\nimport signal; signal.signal(stacks.ASK, signal.SIG_DFL)"  # as after an exec
    child = start(started, before=fork)
    (below,) = stacks.family(child.pid)[1:]
    (answer,) = stacks.ask([below], limit_s=20)
    assert "not asked" in answer.text
    assert went_on(child)


def test_a_stopped_process_is_named_as_stopped_and_answers_nobody_later(started: list[subprocess.Popen[str]]) -> None:
    child = start(started)
    os.kill(child.pid, signal.SIGSTOP)
    (answer,) = stacks.ask([child.pid], limit_s=0.3)
    assert "stopped" in answer.text and "has not answered" in answer.text
    os.kill(child.pid, signal.SIGCONT)
    (answer,) = stacks.ask([child.pid], limit_s=20)
    assert "waits_for_godot" in answer.text
    assert went_on(child)


def test_a_process_that_is_gone_is_said_to_be(started: list[subprocess.Popen[str]]) -> None:
    child = start(started)
    child.kill()
    child.wait(10)
    (answer,) = stacks.ask([child.pid])
    assert answer.name == "gone" and answer.text.startswith("gone\n")


def test_system_calls_of_a_busy_process_go_on_under_many_questions(started: list[subprocess.Popen[str]]) -> None:
    """A file copied by plain system calls while it is asked again and again is whole."""
    copy = 'import os; a, b = os.pipe(); import threading; threading.Thread(target=lambda: [os.write(b, b"x" * 4096) for _ in range(20000)], daemon=True).start(); n = 0\n    while n < 4096 * 20000: n += len(os.read(a, 65536))\n    sys.stdin.readline()'
    child = start(started, wait=copy)
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        stacks.ask([child.pid], limit_s=20)
    assert went_on(child)


def test_the_processes_of_a_run_are_found_by_their_environment(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    ours = start(started, **{stacks.RUN_VARIABLE: str(tmp_path)})
    start(started, **{stacks.RUN_VARIABLE: str(tmp_path / "another")})
    assert stacks.processes_of(tmp_path) == [ours.pid]


def test_asking_itself_from_another_thread_works() -> None:
    stacks.answering()
    found: list[stacks.Process] = []
    thread = threading.Thread(target=lambda: found.extend(stacks.ask([os.getpid()], limit_s=20)))
    thread.start()
    thread.join(30)
    assert "test_asking_itself_from_another_thread_works" in found[0].text
