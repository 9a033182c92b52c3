"""How many samples an engine is given at once: additive increase, multiplicative decrease (Chiu and Jain 1989), by what its scheduler tells.

    more preempted than one in four     the KV cache is overcommitted: a tenth less of what runs, once, until that has taken effect
    requests that end, and a few
    a queue before a full KV cache      more was given than fits: as many as are drawn
    KV cache nearly full, or a queue    no more than now
    all places taken, and none of these one more for each that ended (twice as many in one request's life), until the first sign of
                                        too much; from then on half of that

As in TCP's congestion avoidance (Jacobson 1988) the increase is counted in lives of requests and not in seconds, since what was given last
has not shown its size before it ends. What is not used is not raised: with few leases nothing is learnt about room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FULL = 0.95  # share of the KV cache at which no more is given: what runs grows
TOLERATED = 0.25  # preemptions for each request that ends: a preempted request is computed again in one prefill, an empty place draws nothing
FEW = 1 / 8  # of what runs: so many more are no trend
KEPT = 0.9  # of what ran, when there were too many
SLOW = 1 / 2  # of the steep ascent


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What the scheduler tells at one look. Example: `Load(num_running=24, num_waiting=0, kv_use=0.7, num_preempted=0, want=8)`."""

    num_running: int  # requests given to the engine, its queue included
    num_waiting: int  # of these, those in its queue
    kv_use: float  # 0 to 1
    num_preempted: int  # since the last look; those of weight updates left out
    num_ended: int = 0  # requests that ended since the last look
    want: int = 1  # samples that come together: a group's


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """How many may be given. Example: `Window.fixed(64)`, or `Window.first(most=256, want=8)`."""

    limit: float  # requests in the engine at once, its whole part counts
    most: int  # never more: what the engine draws at once
    steep: bool = True  # no sign of too much has been seen
    preempted: float = 0.0  # beyond the tolerated, since the last decrease
    falling: bool = False  # a decrease has not taken effect yet
    adapts: bool = True

    @classmethod
    def first(cls, *, most: int, want: int = 1) -> Window:
        """Half of the most, or one group."""
        return cls(limit=min(most, max(most / 2, want)), most=most)

    @classmethod
    def fixed(cls, most: int) -> Window:
        return cls(limit=most, most=most, adapts=False)


def adjust(window: Window, load: Load) -> Window:
    """The window after one look; at least 1, at most `most`."""
    if not window.adapts:
        return window
    if window.falling and load.num_running > int(window.limit):
        return window
    preempted = max(0.0, window.preempted + load.num_preempted - TOLERATED * load.num_ended)
    window = replace(window, falling=False, preempted=preempted)
    if preempted > max(1.0, FEW * load.num_running):
        return _cut(window, KEPT * min(window.limit, load.num_running))
    if load.num_waiting > 0 and load.kv_use >= FULL:
        return _cut(window, load.num_running - load.num_waiting)
    if load.num_preempted > 0:
        window = replace(window, steep=False)
    taken = load.num_running + load.want > int(window.limit)
    if not taken or load.num_waiting > 0 or load.kv_use >= FULL:
        return window
    raised = window.limit + load.num_ended * (1.0 if window.steep else SLOW)
    return replace(window, limit=min(float(window.most), raised))


def _cut(window: Window, limit: float) -> Window:
    return replace(window, limit=max(1.0, min(limit, window.limit)), steep=False, falling=True, preempted=0.0)
