"""Each case of the kinds of faults that concern weights, versions and devices is pinned by a test that names it (`# faults.md 40`)."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CASES = {
    "A": [1, 2, 3, *range(5, 19)],  # content of a weight update
    "B": [19, 20, 22, 23, 24, 25, 26],  # hangs, failures, membership
    "C": [28, 29, 30, 31, 32, 33, 34, 35, 37, 38, 39],  # caches, pause and resume, versions
    "N": [128, 129, 130, 131],  # processes and devices
}
_NAMED = re.compile(r"faults\.md ((?:\d+(?:, |,| and )?)+)")


def test_every_case_is_named_beside_a_test() -> None:
    named: dict[int, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if path != Path(__file__).resolve():
            for match in _NAMED.finditer(text):
                for number in re.findall(r"\d+", match[1]):
                    named.setdefault(int(number), []).append(str(path.relative_to(TESTS)))
    assert {kind: [number for number in numbers if number not in named] for kind, numbers in CASES.items()} == {kind: [] for kind in CASES}
