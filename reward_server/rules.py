"""How many calls go together, and when a running process is given up. Pure functions of times and counts.

A sync scorer's calls run one after another, so the first unanswered one is the one that runs. An async scorer's calls
run side by side: when such a process hangs or dies with several unanswered, each is tried again alone.
"""

from __future__ import annotations

import math
from enum import Enum, auto

MAX_BATCH_ITEMS = 64
MAX_TOGETHER = 256  # async calls in one process
BATCH_S = 0.005  # aim of a sync batch: short beside any limit, long beside the cost of a message
KILL_GRACE_S = 1.0  # an async call that ignores its own timeout gets this much more
SILENCE_S = 0.8  # an event loop without a sign of life for so long is blocked


class Verdict(Enum):
    """What to do about a busy process."""

    WAIT = auto()
    SLOW = auto()  # it no longer counts among the workers; calls behind it go elsewhere
    TIMEOUT = auto()  # kill it; the running call is Unscored(timeout), others go elsewhere
    RETRY_ALONE = auto()  # kill it; which call is at fault is unknown, so each is tried alone
    ABANDONED = auto()  # kill it; nobody waits for its call any more


def batch_items(*, is_async: bool, blocks: bool, pace_s: float, num_queued: int, num_workers: int) -> int:
    """Calls of the next batch, 1 to MAX_BATCH_ITEMS.

    pace_s: recent time of a sync call. A batch takes no more than a worker's share of the queue. An async scorer
    that was seen to block its event loop gets one call at a time.
    """
    share = max(1, math.ceil(num_queued / num_workers))
    if is_async:
        return 1 if blocks else min(MAX_BATCH_ITEMS, share)
    return max(1, min(MAX_BATCH_ITEMS, share, int(BATCH_S / max(pace_s, 1e-9))))


def may_start(*, num_busy: int, num_slow: int, max_slow: int) -> bool:
    """Whether a scorer may take one more process; num_busy are those not (yet) slow.

    Once calls were slow, what runs may become slow too, so both together stay below max_slow: the workers remain
    free for other scorers.
    """
    return num_slow == 0 or num_slow + num_busy < max_slow


def verdict(
    *,
    is_async: bool,
    num_unanswered: int,
    all_gone: bool,
    is_slow: bool,
    running_s: float,
    occupied_s: float,
    silent_s: float,
    limit_s: float,
    patience_s: float,
) -> Verdict:
    """running_s: since the running call (async: the oldest) began; occupied_s: the same, async: since the process was last
    idle; silent_s: since the last sign of life of an event loop."""
    if all_gone and running_s > patience_s:
        return Verdict.ABANDONED
    if running_s > (limit_s + KILL_GRACE_S if is_async else limit_s):
        return Verdict.RETRY_ALONE if is_async and num_unanswered > 1 else Verdict.TIMEOUT
    if is_async and num_unanswered > 1 and silent_s > SILENCE_S:
        return Verdict.RETRY_ALONE
    if occupied_s > patience_s and not is_slow:
        return Verdict.SLOW
    return Verdict.WAIT
