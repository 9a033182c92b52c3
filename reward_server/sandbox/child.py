"""The process of one program: takes its place among limits, runs it and its test, and proves that the test was reached.

A test that only asserts runs beside the program, in one interpreter, and is therefore only as strong as Python: a program that
reads this file can pass it. `input/output` and `call` tests are compared outside, and cannot be passed without the answer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import types
from typing import Any, NoReturn

from reward_server.sandbox import jail


def become(job: dict[str, Any], test: dict[str, Any], ask: bytes, user: int, ends: tuple[int, int, int]) -> NoReturn:
    """Never returns: ends with 0 when program and test ended well. `user` -1: stay who you are. ends: stdin, stdout, claim."""
    try:
        jail.die_with_parent()
        high = _descriptors(*ends)
        jail.limit(cpu_s=job["test_s"], memory_bytes=job["memory_bytes"], file_bytes=job["file_bytes"], processes=job["processes"])
        if user >= 0 and not jail.other_user(user):
            os._exit(70)
        jail.no_privileges()
        jail.die_with_parent()  # a change of user clears it
        jail.hide_memory(False)
        _environment(job["site"])
        os._exit(_run(job["program"], test, ask, high))
    except BaseException as error:
        _complain(error)
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0 if isinstance(error, SystemExit) and error.code is None else 1)


def _descriptors(stdin: int, stdout: int, claim: int) -> int:
    """0, 1 and 2 are the program's; the claim lies at a number that it does not know; everything else is closed."""
    high = os.dup2(claim, random.randrange(20, 60))
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.closerange(3, high)
    os.closerange(high + 1, max(4096, os.sysconf("SC_OPEN_MAX")))  # the line to the server lies as high as its own files went
    sys.stdin, sys.stdout, sys.stderr = open(0, encoding="utf-8", errors="replace", closefd=False), open(1, "w", encoding="utf-8", errors="replace", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115  # the program's for life
    os.setsid()
    return high


def _environment(site: list[str]) -> None:
    """No variable of ours is seen inside: tokens live in variables."""
    os.environ.clear()
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=os.getcwd(), TMPDIR=os.getcwd(), LANG="C.UTF-8", PYTHONHASHSEED="0")
    sys.argv = ["answer.py"]
    sys.path[:] = [os.getcwd(), *[path for path in sys.path if path.endswith((".zip", "lib-dynload")) or os.path.basename(path).startswith("python")], *site]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(program: str, test: dict[str, Any], ask: bytes, claim: int) -> int:
    """Exit code. `ask` asks the keeper for the nonce that proves a passed test. What the harness needs is taken before the program runs, so that replacing it in a module changes nothing."""
    read, write, dumps, flush, run, get = os.read, os.write, json.dumps, sys.stdout.flush, exec, getattr
    kind, words = test["kind"], {**test}
    module = types.ModuleType("__main__" if kind == "stdin" else "answer")  # what a program does when it is run, and not imported, is no part of its functions
    sys.modules[module.__name__] = module
    asserts = compile(words["code"], "test.py", "exec") if kind == "assert" else None
    if kind == "stdin":
        os.close(claim)
    run(compile(program, "answer.py", "exec"), module.__dict__)
    if kind == "stdin":
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does at its end: waits for threads
        flush()
        return 0
    if asserts is None:
        payload = dumps(get(module, words["function"])(*words["args"])).encode()
        while payload:
            payload = payload[write(claim, payload) :]
        return 0
    run(asserts, module.__dict__)
    write(claim, ask)
    write(claim, read(claim, 64))
    return 0


def _complain(error: BaseException) -> None:
    try:
        sys.stdout.flush()
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace")[:2000])
    except BaseException:  # it ends with its exit code either way
        pass
