r"""What a text puts into `\boxed{...}`: found by counting braces, in one pass, so that no input takes long."""

from __future__ import annotations

import re

_OPEN = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOIN = re.compile(r"[\s$]*(?:[,;]|,?\s*(?:and|or|\\text\{\s*(?:and|or)\s*\}))[\s$]*")
MAX_BOXES = 16
_MAX_JOIN_CHARS = 40


def final_boxes(text: str) -> list[str]:
    r"""Contents of the last box, and of those before it that only "and", "or" or a comma separates from it, in order.

    Example: `we get \boxed{1} ... or \boxed{2} and \boxed{3}` gives ["2", "3"]. A box that is not closed counts as none.
    """
    found: list[tuple[int, int, str]] = []
    opens = [(match.start(), match.end()) for match in _OPEN.finditer(text)][-MAX_BOXES:]
    limit = len(text)
    for start, inside in reversed(opens):
        end = _closing(text, inside, limit)
        if end is None:
            if found:
                break
            continue
        if found and not _joins(text[end + 1 : found[-1][0]]):
            break
        found.append((start, end, text[inside:end]))
        limit = start
    return [content for _, _, content in reversed(found)]


def _joins(between: str) -> bool:
    return len(between) <= _MAX_JOIN_CHARS and _JOIN.fullmatch(between) is not None


def _closing(text: str, start: int, limit: int) -> int | None:
    """Place of the brace that closes the one before `start`; None where there is none before `limit`."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:limit]):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None
