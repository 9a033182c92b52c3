"""Functions that nobody meant to be scorers: each has its outcome, and the next call of a sane one has its score."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from reward_server.outcome import Scored, Unscored
from reward_server.plane import Plane
from tests.reward_server.endpoints.conftest import plane_of, score

CODE = r'''
import asyncio, decimal, fractions, gc, logging, os, signal, subprocess, sys, threading, time
import numpy
from reward_server import Unscored, batch

def fine(prompt, completion, fields):
    return 1.0

def forks(fields):
    os.fork()  # both come back, and both would answer
    return 0.5

def forks_and_waits(fields):
    child = os.fork()
    if child == 0:
        os._exit(3)
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def closes_all(fields):
    os.closerange(0, 1 << 16)  # a process started by one with many open files has its own at high numbers
    return 0.5

def closes_standard(fields):
    sys.stdin = sys.stdout = sys.stderr = None
    os.closerange(0, 3)
    return 0.5

def reads_standard_input(fields):
    return float(len(sys.stdin.read()))

def prints_odd(fields):
    print("\ud800 half a pair", "\0", "ü" * 10, flush=True)
    sys.stdout.buffer.write(bytes(range(256)))
    return 0.5

def leaves_a_thread(fields):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 0.5

def loops_in_a_thread(fields):
    return asyncio.run(asyncio.sleep(0, 0.5))

def alarms(fields):
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("mine")))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(5)

def unprintable(fields):
    class Odd(Exception):
        def __str__(self): raise RuntimeError("no words")
    raise Odd

def hands_out_a_liar(fields):
    class Liar:
        def __float__(self): return "text"
    return Liar()

def recurses(fields):
    return recurses(fields)

def changes_its_record(fields):
    fields["answer"] = 7
    return float(fields["answer"])

RETURNS = {
    "numpy": lambda fields: numpy.float32(0.5), "numpy int": lambda fields: numpy.int64(2), "numpy bool": lambda fields: numpy.bool_(True),
    "array of one": lambda fields: numpy.array([0.5]), "array of two": lambda fields: numpy.array([0.5, 0.5]), "decimal": lambda fields: decimal.Decimal("0.25"),
    "fraction": lambda fields: fractions.Fraction(1, 4), "true": lambda fields: True, "text": lambda fields: "0.5", "bytes": lambda fields: b"1", "none": lambda fields: None,
    "complex": lambda fields: 1j, "signalling": lambda fields: decimal.Decimal("sNaN"), "generator": lambda fields: (each for each in [1.0]), "set": lambda fields: {1.0},
    "pair of text": lambda fields: (0.5, "format"), "parts of text": lambda fields: (0.5, {"a": "b"}), "odd names": lambda fields: (0.5, {1: 2, "\ud800": 3, None: 4}),
    "many parts": lambda fields: (0.5, {str(number): number for number in range(65)}), "class": lambda fields: Unscored, "reason of its own": lambda fields: Unscored("why", "boredom"),
    "words of bytes": lambda fields: Unscored(b"why"), "huge": lambda fields: 10**400, "minus zero": lambda fields: -0.0, "future": lambda fields: asyncio.sleep(0, 0.5),
}

def odd(prompt, completion, fields):
    return (RETURNS.get(completion) or globals()[completion])(fields)

def odd_words(prompt, completion, fields):
    "\ud800 in a docstring"
    return 1.0

class Callable:
    """An object that can be called."""
    def __call__(self, prompt, completion, fields): return 0.5
    async def later(self, prompt, completion, fields): return 0.25

instance = Callable()

@batch
def lot(prompts, completions, fields):
    if "next" in completions:
        next(iter(()))
    if "exit" in completions:
        raise SystemExit(4)
    if "array" in completions:
        return numpy.arange(len(completions)) / 2
    if "dict" in completions:
        return {each: 1.0 for each in completions}
    return (float(len(each)) for each in completions)

@batch
async def lot_later(prompts, completions, fields):
    raise SystemExit(4)

async def swallows(prompt, completion, fields):
    """Never lets itself be cancelled."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
'''
ERROR, NON_FINITE, REFUSED = "error", "non_finite", "refused"
# what the function does, the outcome: a number, or the reason and a word of why
TABLE: list[tuple[str, float | tuple[str, str]]] = [
    ("forks", 0.5),
    ("forks_and_waits", 3.0),
    ("closes_all", (ERROR, "during the call")),
    ("reads_standard_input", 0.0),
    ("prints_odd", (ERROR, "UnicodeEncodeError")),
    ("leaves_a_thread", 0.5),
    ("loops_in_a_thread", 0.5),
    ("alarms", (ERROR, "TimeoutError: mine")),
    ("unprintable", (ERROR, "Odd: (no text)")),
    ("hands_out_a_liar", (ERROR, "TypeError")),
    ("recurses", (ERROR, "RecursionError")),
    ("changes_its_record", 7.0),
    ("numpy", 0.5),
    ("numpy int", 2.0),
    ("numpy bool", 1.0),
    ("array of one", 0.5),
    ("array of two", (ERROR, "TypeError")),
    ("decimal", 0.25),
    ("fraction", 0.25),
    ("true", 1.0),
    ("text", (NON_FINITE, "of type str")),
    ("bytes", (NON_FINITE, "of type bytes")),
    ("none", (NON_FINITE, "of type NoneType")),
    ("complex", (NON_FINITE, "of type complex")),
    ("signalling", (ERROR, "ValueError")),
    ("generator", (NON_FINITE, "of type generator")),
    ("set", (NON_FINITE, "of type set")),
    ("pair of text", (NON_FINITE, "of type tuple")),
    ("parts of text", (NON_FINITE, "part 'a'")),
    ("odd names", 0.5),
    ("many parts", (ERROR, "at most 64")),
    ("class", (NON_FINITE, "of type type")),
    ("reason of its own", (ERROR, "boredom")),
    ("words of bytes", (REFUSED, "b'why'")),
    ("huge", (NON_FINITE, "larger than any float")),
    ("minus zero", 0.0),
    ("future", 0.5),
]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    (tmp_path / "mine.py").write_text(CODE)
    names = ["fine", "odd", "lot", "lot_later", "instance", "odd_words"]
    sections: list[dict[str, Any]] = [{"name": name, "use": f"mine:{name}", "limit_s": 20} for name in names]
    sections += [{"name": "method", "use": "mine:instance.later"}, {"name": "swallows", "use": "mine:swallows", "limit_s": 0.5}]
    async with plane_of(*sections, folder=tmp_path, cache={"backend": "none"}, workers=2) as made:
        yield made


def said(outcome: Scored | Unscored) -> float | tuple[str, str]:
    return outcome.value if isinstance(outcome, Scored) else (outcome.reason, outcome.detail)


@pytest.mark.timeout(120)
async def test_an_odd_function_has_its_outcome_and_the_next_call_its_score(plane: Plane) -> None:
    wrong = []
    for what, expected in TABLE:
        found = said(await asyncio.wait_for(score(plane, what, name="odd"), 60))
        right = found == expected if isinstance(expected, float) else isinstance(found, tuple) and found[0] == expected[0] and expected[1] in found[1]
        wrong += [] if right else [(what, expected, found)]
        assert await asyncio.wait_for(score(plane, "", name="fine"), 60) == Scored(value=1.0), what
    assert wrong == []
    together = await asyncio.wait_for(asyncio.gather(*(score(plane, what, name="odd") for what, _ in TABLE), *(score(plane, "", name="fine") for _ in TABLE)), 100)
    assert together[len(TABLE) :] == [Scored(value=1.0)] * len(TABLE)
    assert [isinstance(each, Scored) for each in together[: len(TABLE)]] == [isinstance(expected, float) for _, expected in TABLE]
    for _ in range(3):  # last, since what it closes stays closed in its process
        assert await asyncio.wait_for(score(plane, "closes_standard", name="odd"), 60) == Scored(value=0.5)


@pytest.mark.timeout(120)
async def test_odd_batch_functions_and_callables_are_scorers_too(plane: Plane) -> None:
    async def lot(*completions: str) -> list[float | tuple[str, str]]:
        return [said(each) for each in await asyncio.wait_for(asyncio.gather(*(score(plane, each, name="lot") for each in completions)), 60)]

    assert await lot("ab", "") == [2.0, 0.0]  # a generator of results
    assert await lot("next") == [("error", "RuntimeError: StopIteration: next() of something that has no more items")]
    assert await lot("exit") == [("error", "SystemExit: 4")]
    assert await lot("array") == [0.0]
    assert await lot("dict") == [("error", "ValueError: a batch scorer returns a list with one result for each item; for 1 items it returned a dict")]
    assert said(await score(plane, "", name="lot_later")) == ("error", "SystemExit: 4")
    assert (said(await score(plane, "", name="instance")), said(await score(plane, "", name="method"))) == (0.5, 0.25)
    assert plane.scorers["odd_words"].description == "? in a docstring"
    assert said(await asyncio.wait_for(score(plane, "", name="swallows"), 60)) == ("timeout", "no answer within limit_s=0.5")
