"""How much work a formula would make: found before it is parsed or computed, since a hostile one takes for ever."""

from __future__ import annotations

import math
import re
from typing import Any

MAX_DEPTH = 24  # the parser's time grows with a power of the depth: 24 take about a second, 100 some ten
MAX_DIGITS = 20_000
_BRACKETS = re.compile(r"[()\[\]{}]")


def is_too_deep(text: str) -> bool:
    """Whether brackets are nested more than MAX_DEPTH deep."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += 1 if match.group() in "([{" else -1
        if depth > MAX_DEPTH:
            return True
    return False


def is_too_large(expression: Any) -> bool:
    """Whether some number in a sympy expression would have more than MAX_DIGITS digits, or so many terms a polynomial.

    Example: `99**(99**99)` and `10000000!` are, `2**1000` is not.
    """
    import sympy

    for part in sympy.preorder_traversal(expression):
        if isinstance(part, (sympy.Sum, sympy.Product, sympy.Integral)):
            return True  # computing these has no bound worth the name
        if isinstance(part, sympy.Pow) and not _digits(part) <= MAX_DIGITS:
            return True
        if isinstance(part, sympy.factorial) and not _magnitude(part.args[0]) <= MAX_DIGITS / 4:
            return True
    return False


def _digits(power: Any) -> float:
    """About how many digits a power of numbers has; of a sum with variables, how many terms it has when multiplied out, times 10."""
    base, exponent = power.args
    high = _magnitude(exponent)
    if base.free_symbols:
        return 10.0 * math.comb(int(high) + len(base.args) - 1, len(base.args) - 1) if base.is_Add and high < 1e6 else high
    return high * max(1.0, math.log10(_magnitude(base) + 1.0)) if high > 0 else 0.0


def _magnitude(part: Any) -> float:
    """About the absolute value of a number; infinity for a huge one, 0 for what has variables."""
    import sympy

    if part.free_symbols:
        return 0.0
    if part.is_Integer or part.is_Float or part.is_Rational:
        return _as_float(part)
    if isinstance(part, sympy.Pow):
        base, exponent = _magnitude(part.args[0]), _magnitude(part.args[1])
        try:
            return float(base**exponent)
        except OverflowError:
            return math.inf
    if isinstance(part, sympy.factorial):
        return math.inf if _magnitude(part.args[0]) > 170 else float(math.gamma(_magnitude(part.args[0]) + 1))
    values = [_magnitude(each) for each in part.args]
    return math.prod(values) if part.is_Mul else sum(values) if part.is_Add else max(values, default=1.0)


def _as_float(number: Any) -> float:
    try:
        return abs(float(number))
    except OverflowError:
        return math.inf
