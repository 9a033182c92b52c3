"""Follows metrics.jsonl for one tracker: every whole line once, in order, from where the last life of this process stopped."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from learner.trackers.tracker import Tracker, values_of
from protos.appended import whole_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What is kept between two lives, run_dir/trackers/NAME.json. Example: `Place(offset=2048, lineage=0, step=7)`"""

    offset: int = 0  # bytes of metrics.jsonl that the tracker has
    lineage: int = 0  # of the last line
    step: int = 0  # of the last line
    reference: str = ""  # the library's own name of the run; empty: it has none yet
    dropped: str = ""  # why the tracker was given up; empty: it was not

    @classmethod
    def read(cls, path: Path) -> Place:
        """Where there is none, the beginning."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(asdict(self)) + "\n")
        part.replace(path)


class Following:
    """Example: `Following(run_dir / "metrics.jsonl", run_dir / "trackers" / "wandb.json", tracker).catch_up()`"""

    def __init__(self, lines: Path, place: Path, tracker: Tracker, limit: Limit) -> None:
        self._lines, self._file, self._tracker, self._limit = lines, place, tracker, limit
        self.place = Place.read(place)

    def catch_up(self) -> int:
        """Gives the tracker every whole line that it does not have; how many those were. Raises what the tracker raises."""
        count = 0
        for line, end in self._whole_lines():
            content = json.loads(line)
            if "step" in content:
                self._give(content)
                count += 1
            self.place = replace(self.place, offset=end)
            self.place.write(self._file)
        return count

    def _give(self, content: dict) -> None:  # type: ignore[type-arg]
        step, lineage = int(content["step"]), int(content.get("lineage", self.place.lineage))
        with self._limit.of(f"step {step}"):
            if lineage != self.place.lineage and "evaluation" not in content:
                self._tracker.went_back(step)
            self._tracker.log(step, values_of(content), float(content.get("time_s", time.time())))
        self.place = replace(self.place, step=step, lineage=lineage)

    def _whole_lines(self) -> list[tuple[bytes, int]]:
        try:
            size = self._lines.stat().st_size
        except OSError:
            return []  # no step yet
        return whole_lines(self._lines, self.place.offset if self.place.offset <= size else 0)  # 0: another file in its place


class Limit:
    """Calls `passed(what)` from a thread when something inside `of` takes longer than limit_s: a library that hangs cannot be talked to."""

    def __init__(self, limit_s: float, passed: Callable[[str], None]) -> None:
        self._limit_s, self._passed = limit_s, passed

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        timer = threading.Timer(self._limit_s, self._passed, (what,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
