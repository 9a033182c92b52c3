"""The gold answer of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_server.outcome import Unscored


def gold_texts(fields: Mapping[str, Any], field: str) -> list[str] | Unscored:
    """The accepted answers as text: one, or a list's. Unscored: "refused" where the record has none, "bad_reference" where it can be none."""
    if field not in fields:
        return Unscored(f"the record has no field {field!r}, only {sorted(fields)}")
    values = fields[field] if isinstance(fields[field], list) else [fields[field]]
    if not values or any(value is None or isinstance(value, (list, dict)) for value in values):
        return Unscored(f"field {field!r} holds no answer to compare with, but {fields[field]!r:.200}", "bad_reference")
    return [str(value) for value in values]
