"""What a run's journal and metrics say about every group, read without the ledger: who was trained, dropped, lost, or trained twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.gateway.segments import Entry, read_segment, segment_numbers, segment_path


@dataclass(kw_only=True, slots=True)
class Reading:
    """A run's groups by sequence number. plans: step to the groups trained in it, of the lineage that survived."""

    opened: set[int] = field(default_factory=set)
    dropped: Counter[int] = field(default_factory=Counter)
    plans: dict[int, list[int]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)  # steps
    samples: Counter[tuple[int, int]] = field(default_factory=Counter)

    def trained(self) -> Counter[int]:
        return Counter(seq for step in self.closed for seq in self.plans[step])

    def twice(self) -> int:
        """Groups trained more than once, or trained and dropped; samples journaled more than once."""
        trained = self.trained()
        return sum(count - 1 for count in (trained + self.dropped).values() if count > 1) + sum(count - 1 for count in self.samples.values() if count > 1)

    def lost(self, *, max_open: int) -> int:
        """Groups that were opened, are neither trained nor dropped, and are too old to be open still: at most max_open can be."""
        ended = self.trained().keys() | self.dropped.keys()
        missing = sorted(self.opened - ended)
        newest = max(self.opened, default=0)
        return max(len(missing) - max_open, sum(1 for seq in missing if seq <= newest - 2 * max_open), 0)


def read(run_dir: Path) -> Reading:
    """From the raw records, in order; a rollback takes the steps after its cut back."""
    reading = Reading()
    folder = run_dir / "journal"
    numbers = segment_numbers(folder)
    for number in numbers:
        for entry in read_segment(segment_path(folder, number), last=number == numbers[-1]):
            if isinstance(entry, Entry):
                _note(reading, entry.record)
    return reading


def _note(reading: Reading, record: dict[str, Any]) -> None:
    kind = record["type"]
    if kind == "opened":
        reading.opened.add(record["seq"])
    elif kind == "submitted":
        reading.samples[record["seq"], record["sample_index"]] += 1
        if record["dropped"]:
            reading.dropped[record["seq"]] += 1
    elif kind == "dropped":
        reading.dropped.update(record["groups"])
    elif kind == "released":
        reading.dropped.update(record["dropped"])
    elif kind == "planned":
        reading.dropped.update(record["dropped"])
        reading.plans[record["step"]] = list(record["groups"])
    elif kind == "published" and record["closed"]:
        reading.closed.add(record["step"] - 1)
    elif kind == "rolled_back":
        reading.closed = {step for step in reading.closed if step < record["step"]}


def trained_otherwise(reading: Reading, run_dir: Path) -> int:
    """Steps in which the trainer, by its own record, did not train what the journal planned."""
    trained: dict[int, list[str]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            values = json.loads(line)
            trained[values["step"]] = values["groups"]
    wrong = 0
    for step in reading.closed:
        planned = sorted(f"g{seq:08d}" for seq in reading.plans[step])
        wrong += step + 1 in trained and sorted(trained[step + 1]) != planned
    return wrong
