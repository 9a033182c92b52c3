"""When each piece of this process's newest transfers began and ended, on the clock that all processes of one machine share.

    with marks.span("digest"): ...
    marks.taken()          # [("digest", 1041.20, 1041.31)], time.monotonic(); what was taken is forgotten

Held against the engine's own steps this says which piece of an update holds them up (benchmarks/update_pause.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SPANS = 4096  # older ones are forgotten where nobody asks
Span = tuple[str, float, float]  # name, began, ended; seconds
_spans: deque[Span] = deque(maxlen=MAX_SPANS)


@contextmanager
def span(name: str) -> Iterator[None]:
    """A piece, also where it fails. From any thread."""
    began = time.monotonic()
    try:
        yield
    finally:
        _spans.append((name, began, time.monotonic()))


def taken() -> list[Span]:
    """Pieces that ended since the last call, in the order in which they ended."""
    found = []
    while _spans:
        found.append(_spans.popleft())
    return found
