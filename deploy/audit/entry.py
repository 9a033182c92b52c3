"""One record of a journal, whichever way it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DAMAGED = "the journal can be read"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Example: Entry(position=(0, 12), where="journal/000000000000.log at 12", record={"type": "prompts", …}, payload=b"")

    position: (segment, byte) of a journal in segments, (epoch, number) of one in Redis; what a cut's marker calls segment and offset.
    """

    position: tuple[int, int]
    where: str
    record: dict[str, Any]
    payload: bytes
