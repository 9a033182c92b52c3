"""Which policy version drew which tokens of a completion: exact, however many updates it lives through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens [start, end) of a completion were drawn by `version`. Example: `Span(version=3, start=0, end=5)`."""

    version: int
    start: int
    end: int


class SpanTrack:
    """The versions of one running request.

    Example: 5 tokens under 3, then 4 under 4:
        track = SpanTrack(3); track.switch(4, num_tokens=5); track.spans(9)
        # (Span(version=3, start=0, end=5), Span(version=4, start=5, end=9))
    """

    __slots__ = ("_starts",)

    def __init__(self, version: int) -> None:
        self._starts = [(version, 0)]

    def switch(self, version: int, *, num_tokens: int) -> None:
        """From token index num_tokens on, `version` draws. Called while nothing is drawn, with every token drawn so far counted."""
        last_version, last_start = self._starts[-1]
        assert version > last_version, f"version {version} after {last_version}: versions only rise"
        assert num_tokens >= last_start, f"{num_tokens} tokens counted, {last_start} were counted before"
        self._starts.append((version, num_tokens))

    def spans(self, num_tokens: int) -> tuple[Span, ...]:
        """Spans that cover [0, num_tokens) in order, without empty ones. A switch at or beyond num_tokens drew nothing."""
        ends = [start for _, start in self._starts[1:]] + [num_tokens]
        pairs = zip(self._starts, ends, strict=True)
        return tuple(
            Span(version=version, start=start, end=min(end, num_tokens))
            for (version, start), end in pairs
            if start < min(end, num_tokens)
        )
