"""code: the completion's Python program passes the record's tests in a sandbox."""

from __future__ import annotations

import json
import logging
import math
import site
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from reward_server.outcome import Unscored
from reward_server.sandbox import box
from reward_server.sandbox.jail import LAYERS
from reward_server.scorers.blocks import last_block

log = logging.getLogger("headrace.reward_server.scorers.code")

Layer = Literal["network", "processes", "files", "user"]
Extract = Literal["last_block", "raw"]
Seconds = Annotated[float, Field(gt=0, le=600)]
_PYTHON = ("", "python", "python3", "py")
MAX_TESTS = 256


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    field: str = "tests",
    extract: Extract = "last_block",
    partial: bool = False,
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
    test_s: Seconds = 4.0,
    wall_s: Seconds = 9.0,
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 1 << 30,
    file_bytes: Annotated[int, Field(ge=1 << 10)] = 16 << 20,
    output_bytes: Annotated[int, Field(ge=1 << 10, le=64 << 20)] = 1 << 20,
    processes: Annotated[int, Field(ge=1, le=4096)] = 32,
    site_packages: bool = False,
    require: list[Layer] = [],  # noqa: B006 - read only
) -> tuple[float, dict[str, float]] | Unscored:
    """1 when the program passes every test (`partial`: the share passed), else 0.

    Example: tests `[{"input": "2 3", "output": "5"}, {"call": "add", "args": [2, 3], "result": 5}, {"assert": "assert add(2, 3) == 5"}]`.
    Parts: num_passed, num_tests, and `without_LAYER` = 1 for each layer of isolation that this machine does not permit.
    Source: tests as in APPS (Hendrycks et al. 2021, input and output) and HumanEval (Chen et al. 2021, assertions).
    Limits: Python only; an `assert` test can be passed by a program that attacks the harness, the others are compared outside.
    """
    tests = _tests(fields, field)
    if isinstance(tests, Unscored):
        return tests
    program = last_block(completion, _PYTHON) if extract == "last_block" else completion
    bounds = box.Bounds(
        test_s=test_s, wall_s=wall_s, memory_bytes=memory_bytes, file_bytes=file_bytes, output_bytes=output_bytes, processes=processes
    )
    report = box.run(program, [_inside(test) for test in tests], bounds, site=site.getsitepackages() if site_packages else ())
    missing = [name for name in require if not report.layers.get(name)]
    if missing:
        return Unscored(f"require={list(require)}, and this run had no {', '.join(missing)}", "error")
    num_passed = sum(_passed(test, ended, tolerance) for test, ended in zip(tests, report.ended, strict=True))
    value = num_passed / len(tests) if partial else float(num_passed == len(tests))
    without = {f"without_{name}": 1.0 for name in LAYERS if not report.layers.get(name)}
    return value, {"num_passed": float(num_passed), "num_tests": float(len(tests)), **without}


def check(*, require: Sequence[str] = (), test_s: float = 4.0, wall_s: float = 9.0, **_: object) -> None:
    """Raises ValueError when no sandbox can be made here, a required layer is not permitted, or test_s is above wall_s."""
    if test_s > wall_s:
        raise ValueError(f"test_s={test_s:g} must be at most wall_s={wall_s:g}, the limit of all tests together")
    if sys.platform != "linux":
        raise ValueError(f"the scorer code needs Linux, this is {sys.platform}; run this reward server in a Linux container")
    box.sweep()
    try:
        layers = box.run("", [{"kind": "stdin", "stdin": ""}], box.Bounds()).layers
    except OSError as error:
        raise ValueError(f"the scorer code cannot run programs here: {error}") from None
    absent = [name for name in LAYERS if not layers.get(name)]
    if refused := [name for name in require if name in absent]:
        raise ValueError(f"require={list(require)}: this machine does not permit {', '.join(refused)}; allow user namespaces (or CAP_SYS_ADMIN) to this process, or require less")
    if absent:
        log.warning("programs run without isolation of %s: this machine does not permit it (docs/rewards.md, code)", ", ".join(absent))


def _tests(fields: Mapping[str, Any], field: str) -> list[dict[str, Any]] | Unscored:
    """The record's tests, each with its "kind". Text is one assertion."""
    if field not in fields:
        return Unscored(f"the record has no field {field!r}, only {sorted(fields)}")
    given = fields[field]
    listed = given if isinstance(given, list) else [given]
    tests = [_test(each) for each in listed]
    bad = [each for each, test in zip(listed, tests, strict=True) if test is None]
    if bad or not 1 <= len(tests) <= MAX_TESTS:
        what = f"{bad[0]!r:.200}" if bad else f"{len(tests)} tests"
        return Unscored(f'field {field!r} holds {what}; give 1 to {MAX_TESTS} of {{"input": text, "output": text}}, {{"call": name, "args": [...], "result": ...}} or {{"assert": code}}', "bad_reference")
    return [test for test in tests if test is not None]


def _test(given: Any) -> dict[str, Any] | None:
    if isinstance(given, str):
        given = {"assert": given}
    if not isinstance(given, Mapping):
        return None
    keys = set(given)
    if keys == {"input", "output"} and all(isinstance(given[key], str) for key in keys):
        return {"kind": "stdin", **given}
    if keys == {"call", "args", "result"} and isinstance(given["call"], str) and isinstance(given["args"], list):
        return {"kind": "call", **given}
    if keys == {"assert"} and isinstance(given["assert"], str):
        return {"kind": "assert", **given} if _compiles(given["assert"]) else None
    return None


def _compiles(code: str) -> bool:
    try:
        compile(code, "test.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _inside(test: Mapping[str, Any]) -> dict[str, Any]:
    """What the sandbox gets of a test: never the expected answer."""
    if test["kind"] == "stdin":
        return {"kind": "stdin", "stdin": test["input"]}
    if test["kind"] == "call":
        return {"kind": "call", "function": test["call"], "args": test["args"]}
    return {"kind": "assert", "code": test["assert"]}


def _passed(test: Mapping[str, Any], ended: box.Ended, tolerance: float) -> bool:
    """The exit code alone proves nothing: what was printed, returned or proved does."""
    if ended.end != "exit":
        return False
    if test["kind"] == "stdin":
        return _lines(ended.stdout) == _lines(test["output"])
    if test["kind"] == "assert":
        return ended.proved
    try:
        return _alike(json.loads(ended.returned), test["result"], tolerance)
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    """Lines without space at their ends, and without empty ones at the text's end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _alike(given: Any, wanted: Any, tolerance: float) -> bool:
    """Equal as JSON; numbers within the tolerance, relative above 1."""
    if isinstance(wanted, bool) or isinstance(given, bool) or wanted is None:
        return given is wanted
    if isinstance(wanted, (int, float)) and isinstance(given, (int, float)):
        return given == wanted or (tolerance > 0 and math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance))
    if isinstance(wanted, list) and isinstance(given, list):
        return len(given) == len(wanted) and all(_alike(a, b, tolerance) for a, b in zip(given, wanted, strict=True))
    if isinstance(wanted, dict) and isinstance(given, dict):
        return given.keys() == wanted.keys() and all(_alike(given[key], wanted[key], tolerance) for key in wanted)
    return bool(given == wanted)
