"""Scorers that misbehave: each gets its typed outcome, and the calls beside it are answered within two seconds."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from reward_server.outcome import Outcome, Scored, Unscored
from tests.reward_server.conftest import Calls, MakeCalls, spec


def reason(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Unscored) else "scored"


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def beside(calls: Calls, bad: str, fields: dict[str, Any] | None = None) -> Outcome:
    """One bad call in the middle of 31 good ones: checks the good ones and returns the bad one's outcome."""
    good = [calls.submit(0, str(number)) for number in range(15)]
    outcome = calls.submit(0, bad, fields)
    good += [calls.submit(0, str(number)) for number in range(15, 31)]
    values = await asyncio.wait_for(asyncio.gather(*good), 20)
    assert values == [Scored(value=float(number)) for number in range(31)]
    return await asyncio.wait_for(outcome, 20)


@pytest.mark.parametrize(
    ("completion", "expected", "words"),
    [
        ("sleep", "timeout", "limit_s=1"),
        ("backtrack", "timeout", "limit_s=1"),
        ("print", "timeout", "limit_s=1"),
        ("ignore signals", "timeout", "limit_s=1"),
        ("raise", "error", "KeyError: 'no such thing'"),
        ("bad words", "error", "half a pair: ?"),
        ("sys.exit", "error", "SystemExit: 3"),
        ("exit", "error", "exit code 0"),
        ("segfault", "error", "SIGSEGV"),
        ("close", "error", "killed"),
        ("nan", "non_finite", "nan"),
        ("inf", "non_finite", "inf"),
        ("text", "non_finite", "str"),
        ("none", "non_finite", "NoneType"),
        ("nan part", "non_finite", "format"),
        ("unscored", "refused", "no gold answer"),
    ],
)
async def test_one_bad_call_is_unscored_with_its_reason_and_the_other_31_are_scored(
    make_calls: MakeCalls, completion: str, expected: str, words: str
) -> None:
    calls = await make_calls(spec("behaves"))
    outcome = await beside(calls, completion)
    assert isinstance(outcome, Unscored) and outcome.reason == expected and words in outcome.detail
    account = calls.pool.accounts[0]
    assert (account.num_answered, account.num_unscored) == (32, 1)
    assert await calls.all(0, ["5"]) == [Scored(value=5.0)]


async def test_memory_above_the_bound_is_refused_to_the_scorer(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves"), memory_bytes=1 << 30)
    (outcome,) = await calls.all(0, ["allocate"])
    assert isinstance(outcome, Unscored) and outcome.reason == "error" and "MemoryError" in outcome.detail


async def test_parts_and_dicts_keep_their_names(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves"))
    pair, dictionary = await calls.all(0, ["parts", "dict"])
    assert pair == Scored(value=0.5, parts={"format": 1.0, "answer": 0.25})
    assert dictionary == Scored(value=1.0, parts={"tests": 3.0})


async def test_scorers_get_integral_numbers_as_integers(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves"))
    assert await calls.all(0, ["fields"], {"gold": 5, "half": 0.5}) == [Scored(value=1.0, parts={"gold": 1.0, "half": 0.0})]


async def test_five_sleepers_do_not_hold_up_the_calls_of_another_scorer(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves", limit_s=60.0), spec("one"), max_slow=2)
    sleepers = [calls.submit(0, "sleep") for _ in range(5)]  # for a minute each
    for _ in range(4):
        assert await asyncio.wait_for(calls.all(1, [""] * 10), 25) == [Scored(value=1.0)] * 10
        assert calls.pool.accounts[0].num_slow <= 2
        await asyncio.sleep(0.2)
    assert not any(each.done() for each in sleepers)  # so nothing waited for one of them to end


async def test_a_timeout_comes_at_the_limit_and_not_after_the_sleep(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves", limit_s=0.5))
    began_s = time.monotonic()
    assert [reason(each) for each in await calls.all(0, ["sleep"])] == ["timeout"]
    assert 0.5 <= time.monotonic() - began_s < 20  # it would sleep for a minute


async def test_a_slow_call_within_its_limit_is_scored_and_its_process_works_on(make_calls: MakeCalls, tmp_path: Path) -> None:
    calls = await make_calls(spec("slowly", limit_s=10.0))
    fields = {"calls": str(tmp_path / "calls")}
    assert await calls.all(0, ["0.5", "0.01", "0.01"], fields) == [Scored(value=1.0)] * 3
    assert (tmp_path / "calls").read_text() == "..."  # none was made twice


async def test_processes_are_spawned_and_never_forked(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves"))
    (outcome,) = await calls.all(0, ["pid"])
    assert isinstance(outcome, Scored) and outcome.value != os.getpid()
    command = Path(f"/proc/{int(outcome.value)}/cmdline").read_bytes().split(b"\0")
    assert b"reward_server.worker" in command  # a fresh interpreter, not a copy of this one
    assert os.getsid(int(outcome.value)) == int(outcome.value)  # its children die with it


async def test_a_killed_call_leaves_no_child_and_no_zombie(make_calls: MakeCalls, tmp_path: Path) -> None:
    calls = await make_calls(spec("behaves"))
    outcome = await beside(calls, "child", {"pid_file": str(tmp_path / "pid")})
    assert reason(outcome) == "timeout"
    await asyncio.sleep(0.2)
    assert not is_alive(int((tmp_path / "pid").read_text()))


async def test_no_process_is_left_when_the_pool_stops(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("behaves"), workers=2)
    pids = {int(each.value) for each in await calls.all(0, ["pid"] * 20) if isinstance(each, Scored)}
    sleeper = calls.submit(0, "sleep")
    await asyncio.sleep(0.1)
    await calls.pool.stop()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids) and not sleeper.done()


async def test_a_forgotten_caller_costs_neither_queued_nor_running_calls(make_calls: MakeCalls, tmp_path: Path) -> None:
    calls = await make_calls(spec("slowly", limit_s=60.0))
    fields = {"calls": str(tmp_path / "calls")}
    gone = [calls.submit(0, "50", fields, owner="gone") for _ in range(10)]
    await asyncio.sleep(0.15)
    calls.pool.forget("gone")
    began_s = time.monotonic()
    assert await calls.all(0, ["0"], fields) == [Scored(value=1.0)]
    assert time.monotonic() - began_s < 20  # the ten take 50 s each
    await asyncio.sleep(0.5)
    assert (tmp_path / "calls").read_text() == ".."  # one that ran when its caller went, and ours
    assert calls.pool.accounts[0].num_slow == 0 and not any(each.done() for each in gone)


async def test_async_calls_run_side_by_side_and_each_has_its_own_outcome(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("waits", limit_s=2.0))
    began_s = time.monotonic()
    outcomes = await calls.all(0, ["0.5"] * 40 + ["60", "raise"])
    assert time.monotonic() - began_s < 15  # one after another they would take twenty seconds
    assert outcomes[:40] == [Scored(value=1.0)] * 40
    assert [reason(each) for each in outcomes[40:]] == ["timeout", "error"]


async def test_async_calls_that_come_one_by_one_run_side_by_side_too(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("waits", limit_s=9.0), spec("one"), max_slow=1)
    began_s = time.monotonic()
    waiting = []
    for _ in range(12):
        waiting.append(calls.submit(0, "4"))
        await asyncio.sleep(0.05)
    assert await asyncio.gather(*waiting) == [Scored(value=1.0)] * 12
    assert time.monotonic() - began_s < 7.8  # 0.6 s of arrivals and 4 s; if the first went alone, 8 s
    assert await calls.all(1, [""]) == [Scored(value=1.0)]


async def test_async_calls_leave_a_worker_to_other_scorers(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("waits", limit_s=20.0), spec("one"))
    waiting = [calls.submit(0, "6") for _ in range(300)]  # more than one process takes
    await asyncio.sleep(0.7)
    began_s = time.monotonic()
    assert await calls.all(1, [""] * 10) == [Scored(value=1.0)] * 10
    assert time.monotonic() - began_s < 5
    assert await asyncio.gather(*waiting) == [Scored(value=1.0)] * 300


async def test_a_forgotten_caller_ends_its_async_calls_at_once_and_no_others(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("waits", limit_s=60.0))
    gone = [calls.submit(0, "50", owner="gone") for _ in range(10)]
    kept = calls.submit(0, "1", owner="kept")
    await asyncio.sleep(0.3)
    calls.pool.forget("gone")
    assert await kept == Scored(value=1.0)
    assert calls.pool.accounts[0].num_slow == 0 and calls.pool.accounts[0].num_answered == 1
    assert not any(each.done() for each in gone)


async def test_an_async_call_that_kills_its_process_is_found_out_and_the_others_are_scored(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("waits", limit_s=2.0))
    outcomes = await calls.all(0, ["0.05"] * 5 + ["exit"] + ["0.05"] * 5)
    assert [reason(each) for each in outcomes] == ["scored"] * 5 + ["error"] + ["scored"] * 5
    assert isinstance(outcomes[5], Unscored) and "exit code 7" in outcomes[5].detail


async def test_an_async_function_that_blocks_holds_up_others_for_less_than_its_limit(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("blocks", limit_s=6.0))
    blocking = calls.submit(0, "60")
    began_s = time.monotonic()
    assert await calls.all(0, ["0"] * 10) == [Scored(value=1.0)] * 10
    assert time.monotonic() - began_s < 5.5
    assert reason(await blocking) == "timeout"


async def test_ten_million_characters_arrive_whole(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("tells_length", limit_s=5.0))
    assert await calls.all(0, ["x" * 10_000_000, "\U0001f600" * 1_000_000, "\0"]) == [Scored(value=1e7), Scored(value=1e6), Scored(value=1.0)]


async def test_scorers_with_arguments_and_callable_objects_are_called(make_calls: MakeCalls) -> None:
    calls = await make_calls(spec("weighted", weight=0.5), spec("judge"))
    assert await calls.all(0, ["3"]) == [Scored(value=1.5)]
    assert await calls.all(1, ["3"]) == [Scored(value=0.25)]
    assert [each.description for each in calls.pool.accounts] == ["Takes an argument.", "A callable object."]


async def test_a_scorer_that_can_no_longer_be_loaded_leaves_calls_unscored_and_not_waiting(make_calls: MakeCalls, tmp_path: Path) -> None:
    module = tmp_path / "short_lived.py"
    module.write_text("import os\ndef score(prompt, completion, fields): os._exit(1)\n")
    calls = await make_calls(spec("short_lived:score"), folder=tmp_path, spares=0)
    module.write_text("import not_there\n")
    outcomes = await asyncio.wait_for(calls.all(0, ["", "", ""]), 60)
    assert [reason(each) for each in outcomes] == ["error"] * 3
    assert any("not_there" in each.detail for each in outcomes if isinstance(each, Unscored))


@pytest.mark.parametrize(
    ("source", "use", "words"),
    [
        ("", "exakt", "did you mean 'exact'"),
        ("", "nowhere:score", "module 'nowhere' was not found"),
        ("import nowhere_at_all", "made:score", "imports 'nowhere_at_all', which is not installed"),
        ("x = 1", "made:score", "has no 'score'; it has no function"),
        ("def scored(prompt, completion, fields): ...", "made:score", "has no 'score'; it has scored"),
        ("score = 1", "made:score", "cannot be called"),
        ("def score(prompt): ...", "made:score", "does not fit"),
        ("raise RuntimeError('two\\nlines')", "made:score", "RuntimeError: two lines"),
        ("import sys; sys.exit(4)", "made:score", "SystemExit"),
        ("import os; os._exit(4)", "made:score", "ended while it loaded"),
        ("import time; time.sleep(60)", "made:score", "load_limit_s=1.5"),
        ("def score(", "made:score", "SyntaxError"),
        ("", "made:", "not of the form"),
        ("", "reasoning_gym", "dataset"),
    ],
)
async def test_a_scorer_that_cannot_be_loaded_is_one_clear_line(
    make_calls: MakeCalls, tmp_path: Path, source: str, use: str, words: str
) -> None:
    (tmp_path / "made.py").write_text(source)
    load_limit_s = 1.5 if "sleep" in source else 30.0  # a busy machine starts a process late, which is not what is asked here
    with pytest.raises(ValueError) as caught:
        await make_calls(spec(use), folder=tmp_path, load_limit_s=load_limit_s)
    assert words in str(caught.value) and "\n" not in str(caught.value)
