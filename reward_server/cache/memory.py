"""Scores in memory, the least recently asked for first to go. Pure."""

from __future__ import annotations

from collections import OrderedDict

from reward_server.outcome import Scored

# What CPython takes for the key, the Scored, its dict and the table's entry; measured with sys.getsizeof, rounded up.
_ENTRY_BYTES = 400
_PART_BYTES = 100


class MemoryCache:
    """Example: `cache = MemoryCache(max_bytes=1 << 28); cache.put(key, Scored(value=1.0)); cache.get(key)`"""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Scored] = OrderedDict()
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Scored | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, scored: Scored) -> None:
        """Adds or replaces; makes room by dropping what was not asked for longest."""
        before = self._entries.pop(key, None)
        self.num_bytes += size(scored) - (size(before) if before is not None else 0)
        self._entries[key] = scored
        while self.num_bytes > self._max_bytes:
            _, gone = self._entries.popitem(last=False)
            self.num_bytes -= size(gone)
            self.num_evicted += 1


def size(scored: Scored) -> int:
    """Bytes that an entry counts for."""
    return _ENTRY_BYTES + sum(_PART_BYTES + len(name) for name in scored.parts)
