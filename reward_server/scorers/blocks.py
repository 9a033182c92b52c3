"""Fenced blocks of a text in Markdown, found line by line, so that no input takes long."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n", re.MULTILINE)
_CLOSE = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)


def last_block(text: str, languages: Collection[str]) -> str:
    """What the last block of one of the languages ("" for a block that names none) holds; the whole text where there is none.

    A block left open ends with the text.
    """
    at, found = 0, None
    while opening := _FENCE.search(text, at):
        closing = _CLOSE.search(text, opening.end())
        if opening.group(1).lower() in languages:
            found = text[opening.end() : closing.start() if closing else len(text)]
        at = closing.end() if closing else len(text)
    return text if found is None else found
