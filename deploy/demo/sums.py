"""The tool preset's task: a sum that a tiny model cannot work out, and a calculator that can. Pure.

    prompt       37+45>
    policy       37+45=       asks the calculator
    calculator   82>
    policy       82           answers
"""

from __future__ import annotations

import random
from collections.abc import Iterable

LARGEST = 99
LONGEST = 5 + 1  # characters of a policy's turn: two numbers of two digits, + and =


def held_out(num: int, *, seed: int) -> list[tuple[int, int]]:
    """`num` different pairs."""
    return random.Random(seed).sample(_all(), num)


def training(num: int, *, seed: int, excluded: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """`num` pairs, none of them excluded; they may repeat."""
    left = sorted(set(_all()) - set(excluded))
    return random.Random(seed).choices(left, k=num)


def prompt(pair: tuple[int, int]) -> str:
    """`(37, 45)` to `"37+45>"`."""
    return f"{pair[0]}+{pair[1]}>"


def answer(pair: tuple[int, int]) -> str:
    """`(37, 45)` to `"82"`."""
    return str(sum(pair))


def turns(pair: tuple[int, int]) -> list[tuple[str, bool]]:
    """The whole sample done right: texts in order, each with whether the policy says it."""
    return [(prompt(pair), False), (f"{pair[0]}+{pair[1]}=", True), (f"{answer(pair)}>", False), (answer(pair), True)]


def _all() -> list[tuple[int, int]]:
    return [(a, b) for a in range(10, LARGEST + 1) for b in range(10, LARGEST + 1)]
