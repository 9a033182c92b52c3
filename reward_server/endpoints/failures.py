"""How an attempt at a remote call fails, and what follows from it. Pure."""

from __future__ import annotations

import email.utils
import math
from typing import Literal

Kind = Literal["timeout", "error", "unavailable", "overloaded", "refused"]

MAX_RETRY_AFTER_S = 3600.0


class Failed(Exception):
    """One attempt failed. Not a frozen dataclass: the interpreter writes tracebacks into exceptions.

    Example: `raise Failed("overloaded", "429 Too Many Requests", is_retryable=True, retry_after_s=1.0)`
    """

    def __init__(self, kind: Kind, detail: str, *, is_retryable: bool, is_ailing: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind  # the reason of the unscored outcome when no attempt is left
        self.detail = detail  # for people; holds no credentials
        self.is_retryable = is_retryable  # whether the same call may succeed later
        self.is_ailing = is_ailing  # whether it speaks against the upstream's health: the breaker counts it
        self.retry_after_s = retry_after_s  # what the other side asked for, at least 0


_ASKS_TO_WAIT = {429, 503}
_LATER = {408, 425, 429, 500, 502, 503, 504}


def of_status(status: int, text: str, retry_after: str | None, now_epoch_s: float) -> Failed:
    """The failure that an HTTP status means (RFC 9110, section 15; 429: RFC 6585, section 4). text: the beginning of the body."""
    wait_s = retry_after_s(retry_after, now_epoch_s) if status in _ASKS_TO_WAIT else None
    detail = f"HTTP {status}{': ' + text if text else ''}"
    if status == 429 or (status == 503 and wait_s is not None):
        return Failed("overloaded", detail, is_retryable=True, retry_after_s=wait_s)
    if status >= 500 or status in _LATER:
        return Failed("error", detail, is_retryable=status in _LATER, is_ailing=status >= 500)
    return Failed("refused", detail, is_retryable=False)


def retry_after_s(value: str | None, now_epoch_s: float) -> float | None:
    """Seconds of a Retry-After header, a number or a date (RFC 9110, section 10.2.3); None: absent or unreadable. At most an hour."""
    if value is None:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(value).timestamp() - now_epoch_s
        except ValueError:
            return None
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(wait_s) else None
