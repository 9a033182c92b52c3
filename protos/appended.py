"""Files that grow by lines while others read them."""

from __future__ import annotations

from pathlib import Path


def whole_lines(file: Path, offset: int) -> list[tuple[bytes, int]]:
    """Complete lines from a byte offset on, each with the offset after it; none where there is no file. A line ends with a line feed: a carriage
    return, with which progress bars begin anew, is a character of its line."""
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(offset)
        result = []
        for line in opened:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            result.append((line, offset))
    return result
