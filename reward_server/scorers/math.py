"""math: the completion's final answer is mathematically equal to the gold one (package math-verify, Apache-2.0)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from reward_server import extras
from reward_server.outcome import Unscored
from reward_server.scorers import size
from reward_server.scorers.boxed import final_boxes
from reward_server.scorers.gold import gold_texts

MAX_ANSWER_CHARS = 2000  # of an answer, or of the end of a completion that marks none: its parser takes more than linear time
_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin\{(?:equation|align)")
_COMMANDS = re.compile(r"\\(?:text|mathrm|operatorname|mbox)\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_PLAIN_WORDS = frozenset(["and", "or", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "max", "min", "gcd", "lcm", "mod", "inf", "oo", "infinity"])


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    field: str = "answer",
    require_boxed: bool = False,
    digits: Annotated[int, Field(ge=1, le=15)] = 6,
) -> float | Unscored:
    r"""1 when the last answer of the completion equals the record's answer (or one of a list), else 0.

    Example: gold `1/3` (or `$\frac13$`), completion `... so \boxed{\frac{2}{6}}`: 1. The answer is what the last `\boxed{}`
    holds (several joined by "and" or commas are a set), else the last formula or number; `require_boxed` gives 0 without a box.
    digits: decimal places to which numbers written with a point must agree.
    Limits: the parser is heuristic; a percent sign counts as nothing between integers; an answer longer than 2,000 characters, nested more than
    24 deep, or of more than 20,000 digits is wrong.
    """
    gold = gold_texts(fields, field)
    if isinstance(gold, Unscored):
        return gold
    references = [_reference(text) for text in gold]
    unusable = [text for text, parsed in zip(gold, references, strict=True) if not parsed]
    if unusable:
        return Unscored(f"field {field!r} holds {unusable[0]!r:.200}, which is no mathematics as a whole; write formulas as $...$, and score words with `exact`", "bad_reference")
    answer = _answer(completion, require_boxed)
    return float(bool(answer) and any(_equal(each[0], answer[0], digits) for each in references))


def check(*, field: str = "answer", require_boxed: bool = False, digits: int = 6) -> None:
    """Raises ValueError without the package."""
    extras.need("math_verify", scorer="math", extra="reward-math")
    extras.need("antlr4", scorer="math", extra="reward-math")
    _library()


@lru_cache(maxsize=1)
def _library() -> Any:
    """math_verify, without its warning that nobody limits its time: our process is killed from outside (faults.md 100)."""
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


def _parsed(text: str, *, plain: bool) -> list[Any]:
    """The one expression in a text, in a list; empty: none. plain: a bare number or sum counts too."""
    if size.is_too_deep(text):
        return []
    library = _library()
    kinds = [library.LatexExtractionConfig(boxed_match_priority=0)] + [library.ExprExtractionConfig()] * plain
    found = library.parse(text, extraction_config=kinds, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    return list(found[:1])


@lru_cache(maxsize=512)
def _reference(text: str) -> list[Any]:
    """The gold answer, read as one formula from end to end: the library alone takes only the last number of `1331 and 1728`."""
    if len(text) > MAX_ANSWER_CHARS or not text.strip():
        return []
    if _MARKED.search(text):
        return _parsed(text, plain=False)
    if any(word.lower() not in _PLAIN_WORDS for word in _WORD.findall(_COMMANDS.sub(" ", text))):
        return []  # `Paris` would be read as the product P·a·r·i·s
    return _parsed(f"${text.strip()}$", plain=False)


def _answer(completion: str, require_boxed: bool) -> list[Any]:
    boxes = final_boxes(completion)
    if boxes:
        text = ", ".join(boxes)
        return _parsed(f"${text}$", plain=False) if len(text) <= MAX_ANSWER_CHARS else []
    return [] if require_boxed else _parsed(completion[-MAX_ANSWER_CHARS:], plain=True)


def _equal(gold: Any, answer: Any, digits: int) -> bool:
    """Whether the answer is the gold. The library's verdict but for equations: it would take any of them for its right-hand side."""
    import sympy

    if gold == answer:
        return True
    relation = sympy.core.relational.Relational
    if isinstance(answer, sympy.Eq) and not isinstance(gold, relation) and not answer.lhs.free_symbols:
        answer = answer.rhs  # 2 + 3 = 5
    if size.is_too_large(answer):
        return False
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and not _assigns(gold):
        return _same_equation(gold, answer)
    if isinstance(gold, sympy.Eq) and not _assigns(gold):
        return False
    if isinstance(answer, sympy.Eq) and not isinstance(gold, relation) and answer.lhs.free_symbols and not _assigns(answer):
        return False
    return bool(_library().verify([gold], [answer], float_rounding=digits, timeout_seconds=None))


def _assigns(equation: Any) -> bool:
    """Whether it only names its right-hand side, as x = 5 or f(x) = 2x do."""
    left = equation.lhs
    return bool(left.is_Symbol or getattr(left, "is_Function", False))


def _same_equation(gold: Any, answer: Any) -> bool:
    """Whether left minus right of one is a constant multiple, not 0, of the other's: 2x = 4 and x - 2 = 0."""
    import sympy

    ours, theirs = sympy.expand(gold.lhs - gold.rhs), sympy.expand(answer.lhs - answer.rhs)
    if ours == 0 or theirs == 0:
        return bool(ours == theirs)
    ratio = sympy.simplify(ours / theirs)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)
