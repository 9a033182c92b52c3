"""Counts by reason, in words."""

from __future__ import annotations

from collections.abc import Mapping


def counted(counts: Mapping[str, int]) -> str:
    """Empty where nothing was counted. Example: counted({"zero_signal": 26, "unusable": 1}) is "unusable 1, zero_signal 26"."""
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
