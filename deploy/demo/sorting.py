"""The smoke run's task: sort three digits. Pure, since the reward server imports the scorer from here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

NUM_DIGITS = 3


def held_out(num: int, *, seed: int) -> list[str]:
    """`num` different strings of digits."""
    return random.Random(seed).sample(_all(), num)


def training(num: int, *, seed: int, excluded: Iterable[str]) -> list[str]:
    """`num` strings, none of them excluded; they may repeat."""
    left = sorted(set(_all()) - set(excluded))
    return random.Random(seed).choices(left, k=num)


def prompt(digits: str) -> str:
    """`"312"` to `"312>"`."""
    return f"{digits}>"


def answer(digits: str) -> str:
    """`"312"` to `"123"`."""
    return "".join(sorted(digits))


def score(prompt: str, completion: str, fields: Mapping[str, Any]) -> float:
    """1 for the sorted digits and nothing else, else half the share of right places.

    Worked example: "1243" for "1234" has two of four right and no excess: 0.5 * 2 / 4 = 0.25.
    """
    wanted = str(fields["answer"])
    if completion == wanted:
        return 1.0
    right = sum(got == want for got, want in zip(completion, wanted, strict=False))
    return 0.5 * right / max(len(wanted), len(completion))


def _all() -> list[str]:
    return [f"{number:0{NUM_DIGITS}d}" for number in range(10**NUM_DIGITS)]
