"""The code scorer: programs that are right, wrong, and hostile (faults.md 108)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward_server import registry
from reward_server.config import ScorerConfig
from reward_server.outcome import Scored, Unscored
from reward_server.sandbox import box, inside, jail
from reward_server.scorers import code
from reward_server.scorers.blocks import last_block
from tests.reward_server.conftest import MakeCalls, spec

SUM = {"input": "2 3\n", "output": "5\n"}
ADD = {"call": "add", "args": [2, 3], "result": 5}
ASSERT = {"assert": "assert add(2, 3) == 5"}
DEFINES = "def add(a, b):\n    return a + b\n"
READS = "a, b = map(int, input().split())\nprint(a + b)\n"


def scored(program: str, *tests: Any, **args: Any) -> tuple[float, dict[str, float]]:
    outcome = code.score("", program, {"tests": list(tests)}, **{"test_s": 1.0, "wall_s": 3.0, "extract": "raw", **args})
    assert isinstance(outcome, tuple), outcome
    return outcome


def left_behind() -> list[str]:
    """Live processes of sandboxes, and their folders."""
    found = [" ".join(each.info["cmdline"] or [])[:200] for each in psutil.process_iter(["cmdline", "status"]) if "reward_server.sandbox" in " ".join(each.info["cmdline"] or [])]
    return found + [str(path) for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("headrace-sandbox-*")]


@pytest.mark.parametrize(
    ("program", "tests", "value"),
    [
        (READS, [SUM], 1.0),
        (DEFINES, [ADD, ASSERT], 1.0),
        (DEFINES + 'if __name__ == "__main__":\n    print(add(*map(int, input().split())))\n', [SUM, ADD, ASSERT], 1.0),  # run with input, imported without
        (READS.replace("+", "-"), [SUM], 0.0),
        (DEFINES.replace("+", "-"), [ADD], 0.0),
        (DEFINES.replace("+", "-"), [ASSERT], 0.0),
        ("def add(a, b): return {'s': [a, (b, None, True)]}", [{"call": "add", "args": [1, 2], "result": {"s": [1, [2, None, True]]}}], 1.0),
        ("print(5)\nraise SystemExit(1)", [SUM], 0.0),  # right words, wrong end
        ("print(5)  \nprint()", [SUM], 1.0),  # space at the ends of lines and of the text does not count
        ("syntax error", [SUM], 0.0),
        ("print(5)\0", [SUM], 0.0),
        ("", [ASSERT], 0.0),
        ("import threading\nthreading.Thread(target=lambda: print(5)).start()", [SUM], 1.0),
    ],
)
def test_a_program_is_worth_what_its_tests_say(program: str, tests: list[Any], value: float) -> None:
    assert scored(program, *tests)[0] == value


def test_partial_is_the_share_of_tests_passed() -> None:
    # 2 of 3: abs gives 2, 3 and fails on text
    tests = [{"call": "f", "args": [-2], "result": 2}, {"call": "f", "args": [3], "result": 3}, {"call": "f", "args": ["x"], "result": 0}]
    value, parts = scored("f = abs", *tests, partial=True)
    assert value == pytest.approx(2 / 3) and parts["num_passed"] == 2.0 and parts["num_tests"] == 3.0
    assert scored("f = abs", *tests)[0] == 0.0
    assert scored("def f(): return 0.1 + 0.2", {"call": "f", "args": [], "result": 0.3}, tolerance=1e-9)[0] == 1.0
    assert scored("def f(): return 0.1 + 0.2", {"call": "f", "args": [], "result": 0.3})[0] == 0.0


CHEATS = {  # none of them knows the answer, each hopes that its end is taken for success
    "exit code 0 before the tests": "import os\nos._exit(0)",
    "exit code 0 when called": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "writes to every descriptor": "import os\nfor fd in range(3, 200):\n    try: os.write(fd, b'?' * 16)\n    except OSError: pass\nos._exit(0)",
    "claims its parent's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')\n",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)\n",
    "replaces what it knows of the harness": "import os, json, builtins\nos.write = os.read = lambda *a: 1\njson.dumps = lambda *a: '5'\nbuiltins.exec = lambda *a: None\n",
}


@pytest.mark.parametrize("layers", [jail.LAYERS, ("user",)], ids=["isolated", "not permitted"])
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_ending_well_before_the_tests_earns_nothing(program: str, layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box.Bounds.__init__, "__kwdefaults__", {**(box.Bounds.__init__.__kwdefaults__ or {}), "layers": layers})
    assert scored(program, ASSERT)[0] == 0.0 and scored(program, ADD)[0] == 0.0  # faults.md 108
    assert left_behind() == []


HOSTILE = {
    "endless loop": ("while True: pass", "time"),
    "ten gigabytes": ("x = bytearray(10 << 30)\nprint(5)", "code 1"),
    "children that ignore SIGTERM and leave the session": (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(100)\n        os._exit(0)\ntime.sleep(100)",
        "time",
    ),
    "children after its own end": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint(6)", "exit"),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", None),  # time or memory, whichever is seen first
    "infinite output": ("while True: print('x' * 1000)", "output"),
    "a file without end": ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "code 1"),
    "deep recursion": ("def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()", None),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "time"),
}


@pytest.mark.parametrize("layers", [jail.LAYERS, ("user",)], ids=["isolated", "not permitted"])
@pytest.mark.parametrize(("program", "end"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_ends_within_its_limits_and_leaves_nothing(program: str, end: str | None, layers: tuple[str, ...]) -> None:
    bounds = box.Bounds(test_s=0.7, wall_s=1.0, memory_bytes=256 << 20, file_bytes=1 << 20, processes=16, layers=layers)
    report = box.run(program, [{"kind": "stdin", "stdin": ""}], bounds)  # faults.md 108
    assert end is None or report.ended[0].end == end
    assert left_behind() == []


def test_a_hanging_test_does_not_cost_the_others() -> None:
    program = "def f(n):\n    while n: pass\n    return n"
    tests = [{"call": "f", "args": [n], "result": 0} for n in (0, 1, 0)]
    assert scored(program, *tests, partial=True, test_s=0.3)[1]["num_passed"] == 2.0


needs_isolation = pytest.mark.skipif(not all(box.run("", [{"kind": "stdin"}], box.Bounds()).layers.values()), reason="this machine permits no namespaces")


@needs_isolation
def test_a_program_sees_no_network_no_other_process_no_variable_and_no_file_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    program = f"""
import os, socket
print(os.path.exists({str(tmp_path)!r}), os.path.exists({__file__!r}), "JUDGE_TOKEN" in os.environ, len([n for n in os.listdir("/proc") if n.isdigit()]) <= 2)
for path in ("/usr/x", "/x"):
    try: open(path, "w")
    except OSError as error: print(error.errno)
open("mine", "w").write("may")
try: socket.create_connection(("127.0.0.1", 22), 1)
except OSError as error: print(error.errno)
"""
    assert box.run(program, [{"kind": "stdin", "stdin": ""}], box.Bounds()).ended[0].stdout.split() == ["False", "False", "False", "True", "30", "30", "101"]  # EROFS twice, ENETUNREACH


def test_a_layer_that_is_not_permitted_is_told_and_refused_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    real = box.run
    monkeypatch.setattr(box, "run", lambda program, tests, bounds, **extra: real(program, tests, box.Bounds(layers=("user",)), **extra))
    value, parts = scored(READS, SUM)
    assert value == 1.0 and parts["without_network"] == parts["without_files"] == parts["without_processes"] == 1.0
    with pytest.raises(ValueError, match=r"does not permit network; allow user namespaces"):
        code.check(require=["network"])
    outcome = code.score("", READS, {"tests": [SUM]}, require=["network"])
    assert isinstance(outcome, Unscored) and outcome.reason == "error"


@pytest.mark.parametrize("tests", [[], "not python at all(", [5], [{"input": "x"}], [{"call": "f", "args": 1, "result": 1}], [{"assert": "("}], None, [SUM] * 300])
def test_tests_that_cannot_be_run_are_a_bad_reference(tests: Any) -> None:
    outcome = code.score("", READS, {"tests": tests})
    assert isinstance(outcome, Unscored) and outcome.reason == "bad_reference"
    assert code.score("", READS, {}).reason == "refused"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("text\n```python\nx = 1\n```\nmore", "x = 1\n"),
        ("```python\na\n```\n```py\nb\n```\n```sh\nls\n```", "b\n"),
        ("```\nx\n```", "x\n"),
        ("```python\nopen", "open"),
        ("x = 1", "x = 1"),
        ("```json\n{}\n```", "```json\n{}\n```"),
    ],
)
def test_the_program_is_the_last_python_block(completion: str, program: str) -> None:
    assert last_block(completion, ("", "python", "py")) == program


def test_bad_arguments_are_refused_at_load() -> None:
    for args, words in (({"require": ["nets"]}, "require.0='nets'"), ({"test_s": 5.0, "wall_s": 2.0}, "test_s=5 must be at most wall_s=2"), ({"memory_bytes": 1}, "memory_bytes=1")):
        with pytest.raises(ValueError, match=words):
            registry.load("code", args)


async def test_programs_run_from_scorer_processes_and_one_killed_at_its_limit_leaves_nothing(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("code", limit_s=20.0, extract="raw"), spec("code", limit_s=0.6, extract="raw"), workers=2)
    outcomes = await asyncio.wait_for(calls.all(0, [READS] * 4, {"tests": [SUM]}), 40)
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Scored)] == [1.0] * 4
    killed = await asyncio.wait_for(calls.submit(1, "while True: pass", {"tests": [SUM]}), 20)
    assert isinstance(killed, Unscored) and killed.reason == "timeout"
    async with asyncio.timeout(60):
        while left_behind():
            await asyncio.sleep(0.05)


def test_a_machine_that_permits_a_layer_in_name_only_gets_the_next_smaller_set(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = "from reward_server.sandbox import jail\ndef no(*_): raise PermissionError('not here')\njail.new_root = no\n"
    monkeypatch.setattr(box, "_START", box._START.replace("; from", f"\n{breaks}from", 1).replace("; inside", "\ninside"))
    monkeypatch.setattr(box, "_refused", set())
    assert box.run(READS, [{"kind": "stdin", "stdin": "2 3"}], box.Bounds()).ended[0].stdout == "5\n"
    assert box._refused == ({frozenset(jail.LAYERS)} if os.access("/proc/self/ns/mnt", os.R_OK) and box.run("", [{"kind": "stdin"}], box.Bounds(layers=("network",))).layers["network"] else set())


def test_the_sandbox_must_end_before_its_scorer_is_killed() -> None:
    with pytest.raises(ValueError, match=r"limit_s=9 must be at least a second more than wall_s=9"):
        ScorerConfig.model_validate({"name": "c", "use": "code", "limit_s": 9})


def test_what_a_killed_run_left_is_swept_away_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, age_s in (("headrace-sandbox-old", 4000), ("headrace-sandbox-new", 10), ("other", 4000)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    box.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace-sandbox-new", "other"]


def test_children_are_found_on_a_kernel_that_does_not_list_them() -> None:
    child = subprocess.Popen(["sleep", "20"])
    try:
        assert set(inside._by_parent(os.getpid())) == set(inside._children(os.getpid())) >= {child.pid}
    finally:
        child.kill()
        child.wait()


def test_the_tick_of_the_keeper_is_far_below_the_shortest_limit() -> None:
    assert inside.TICK_S <= 0.05
