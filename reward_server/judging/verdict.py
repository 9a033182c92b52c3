"""The verdict in a judge's answer. Linear in the length of the answer, whatever it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_NUMBER = re.compile(r"[-+]?[0-9]{1,15}(?:\.[0-9]{1,15})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictRule:
    """Where a verdict stands and what it may be.

    Example: `VerdictRule(tag="verdict", low=0.0, high=10.0)` reads `... <verdict>7</verdict>` as 7.
    """

    tag: str  # the last <tag>...</tag>; empty: the whole answer
    low: float
    high: float
    choices: Mapping[str, float] = field(default_factory=dict)  # words and what they are worth; empty: a number is asked for

    def read(self, text: str) -> float:
        """Raises ValueError for an answer without a valid verdict; what it says names what was found."""
        word = self._word(text).strip()
        if self.choices:
            worth = {name.casefold(): value for name, value in self.choices.items()}
            if word.casefold() not in worth:
                raise ValueError(f"the verdict {word[:100]!r} is none of {', '.join(self.choices)}")
            return worth[word.casefold()]
        if _NUMBER.fullmatch(word) is None or not self.low <= float(word) <= self.high:
            raise ValueError(f"the verdict {word[:100]!r} is no number from {self.low:g} to {self.high:g}")
        return float(word)

    def _word(self, text: str) -> str:
        if not self.tag:
            return text
        start = text.rfind(f"<{self.tag}>")
        end = text.find(f"</{self.tag}>", start)
        if start < 0 or end < 0:
            raise ValueError(f"the answer has no <{self.tag}>...</{self.tag}>; it ends with {text[-100:]!r}")
        return text[start + len(self.tag) + 2 : end]
