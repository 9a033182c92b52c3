"""What a score is kept under: a digest of everything that it depends on. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST_BYTES = 16


class Scope:
    """One scorer as configured: its name, the version of its code, its configuration.

    Example: `Scope("sums", "3f2a…", {"use": "last_number"}).key("1 + 1?", "2", b"")` is 16 bytes.
    """

    def __init__(self, name: str, version: str, configuration: Mapping[str, Any]) -> None:
        said = json.dumps([name, version, configuration], sort_keys=True)
        self._begun = hashlib.blake2b(said.encode(), digest_size=DIGEST_BYTES)

    def key(self, prompt: str, completion: str, fields: bytes) -> bytes:
        """Lengths come first, so that no text can pass into its neighbour."""
        begun = self._begun.copy()
        first, second = prompt.encode(), completion.encode()
        begun.update(b"%d %d %d:" % (len(first), len(second), len(fields)))
        begun.update(first + second + fields)
        return begun.digest()
