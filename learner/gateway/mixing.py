"""Which of several data sets the next group comes from: shares are exact at every moment, not only in the long run.

Tijdeman's rule for the chairman assignment problem (R. Tijdeman, Discrete Mathematics 32, 1980, 323-330): with k sets of shares w, after
every n groups each set has had n * w of them to within 1 - 1 / (2k - 2). Integers throughout, so nothing depends on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction


def whole_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """The weights as integers in the same proportion, as they are written: 0.1 is a tenth. Raises ValueError for one that is not above 0."""
    for name, weight in weights.items():
        if not weight > 0:
            raise ValueError(f"data.sets.{name}.weight={weight} must be above 0; leave the set out instead")
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}
    least = math.lcm(*(value.denominator for value in exact.values()))
    return {name: int(value * least) for name, value in exact.items()}


def next_set(weights: Mapping[str, int], given: Mapping[str, int]) -> str:
    """The set whose turn it is. given: groups of each set so far; ties go to the set that stands first.

    For instance weights 2 and 1: the first, the second, the first, and so again.
    """
    total, turn, k = sum(weights.values()), sum(given[name] for name in weights) + 1, len(weights)
    if k == 1:
        return next(iter(weights))
    owed = {name: turn * weight - given[name] * total for name, weight in weights.items()}  # times total
    due = [name for name in weights if owed[name] * (2 * k - 2) >= total]
    return min(due, key=lambda name: Fraction((2 * k - 3) * total - owed[name] * (2 * k - 2), weights[name]))
