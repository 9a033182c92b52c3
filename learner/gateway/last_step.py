"""What the trainer's lines of metrics.jsonl tell: the newest step, and sums over those read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from protos.processes import resident_bytes

FIRST_BYTES = 1 << 20  # read of a file that is there already


class LastStep:
    """Reads what was appended since the last look. Example: `LastStep(run_dir / "metrics.jsonl").read().get("loss")`"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None
        self.line: dict[str, Any] = {}  # of the newest step; empty: none yet
        self.num_steps = self.num_skipped_updates = 0  # over the lines read
        self.seconds: Counter[str] = Counter()  # by piece, over the lines read
        self.num_tokens: Counter[str] = Counter()  # trained, generated; over the lines read

    def read(self) -> dict[str, Any]:
        """The newest step's line."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                begins = self._offset is None
                start = max(0, size - FIRST_BYTES) if self._offset is None or self._offset > size else self._offset
                file.seek(start)
                text = file.read()
        except OSError:
            return self.line  # no step yet
        whole = text.rfind(b"\n") + 1
        self._offset = start + whole
        for raw in text[:whole].splitlines()[1 if begins and start else 0 :]:
            self._add(raw)
        return self.line

    def _add(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
        except ValueError:
            return  # the piece of a line that a crash left
        if "evaluation" in line or "step" not in line:
            return
        self.line = line
        self.num_steps += 1
        self.num_skipped_updates += line.get("skipped_updates", 0)
        for name, seconds in line.get("seconds", {}).items():
            self.seconds[name] += seconds
        self.num_tokens["trained"] += line.get("trained_tokens", 0)
        self.num_tokens["generated"] += line.get("generated_tokens", 0)


def rank_memory_bytes(parent: int) -> dict[str, float | None]:
    """Resident memory of each trainer rank among a process's children, by rank."""
    found: dict[str, float | None] = {}
    try:
        children = [child for task in Path(f"/proc/{parent}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return found
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "learner.trainer" in words and "--rank" in words[:-1]:
            found[words[words.index("--rank") + 1]] = resident_bytes(int(child))
    return found
