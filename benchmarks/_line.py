"""What every benchmark shares: interleaved pairs, bars, and the JSON line that is printed last.

Two things are compared by measuring them in turns in one run, so that whatever else the machine does hits both; a ratio is the
median over at least MIN_PAIRS pairs of the ratio within each pair.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
MIN_PAIRS = 6

Pair = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One value and what it must reach. Example: Bar(name="eff_64", value=0.98, op=">=", bar=0.97).passed is True."""

    name: str
    value: float
    op: Literal[">=", "<=", "=="]
    bar: float

    @property
    def passed(self) -> bool:
        """A value that is no number never passes."""
        return {">=": self.value >= self.bar, "<=": self.value <= self.bar, "==": self.value == self.bar}[self.op]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": float(f"{self.value:.4g}"), "op": self.op, "bar": self.bar, "passed": self.passed}


def interleaved(measures: Mapping[str, Callable[[], float]], *, num_pairs: int, seen: Callable[[Pair], None] = lambda _: None, until_s: float = math.inf) -> list[Pair]:
    """Each measure once a pair, in an order that turns round from pair to pair.

    seen: told of each pair as it comes, since a run may be cut off. until_s: on the monotonic clock; no pair begins after it, so that there may be fewer.
    Raises ValueError for fewer than MIN_PAIRS.
    """
    if num_pairs < MIN_PAIRS:
        raise ValueError(f"num_pairs={num_pairs}: a median needs at least {MIN_PAIRS} pairs")
    names = list(measures)
    pairs: list[Pair] = []
    while len(pairs) < num_pairs and time.monotonic() < until_s:
        order = names if len(pairs) % 2 == 0 else names[::-1]
        measured = {name: measures[name]() for name in order}
        pairs.append({name: measured[name] for name in names})
        seen(pairs[-1])
    return pairs


def ratio(pairs: Sequence[Pair], over: str, under: str) -> float:
    """Median over the pairs of `over` divided by `under` of the same pair."""
    return statistics.median(pair[over] / pair[under] for pair in pairs)


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    return parser


def tell(facts: Mapping[str, Any]) -> None:
    """A part's outcome as a JSON line on the error stream, as soon as it is there: of a run that is cut off they are what is left."""
    print(json.dumps(facts), file=sys.stderr, flush=True)


def watch(every_s: float) -> None:
    """Tells on the error stream every so many seconds where the main thread is: of a part that does not end, why. Once a process, from the main thread."""

    def told(number: int, frame: Any) -> None:
        tell({"still_at": [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)[-14:]]})

    signal.signal(signal.SIGALRM, told)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)


def report(name: str, *, bars: Sequence[Bar], pairs: Sequence[Pair], packages: Iterable[str], quiet: bool, notes: Mapping[str, Any] | None = None, finished: bool = True) -> None:
    """Prints a table unless quiet, then the line. notes: what else was seen, beside the bars; packages: whose versions matter; finished: False for a run that left bars out, which has not passed."""
    if not quiet:
        for bar in bars:
            print(f"{bar.name:>22} {bar.value:>12.3f}  ({bar.op} {bar.bar:g}: {'passed' if bar.passed else 'missed'})")
        for key, value in (notes or {}).items():
            print(f"{key:>22} {value}")
    rounded = [{key: float(f"{value:.5g}") for key, value in pair.items()} for pair in pairs]
    line = {
        "name": name,
        "passed": finished and all(bar.passed for bar in bars),
        "bars": [bar.to_json() for bar in bars],
        "pairs": rounded,
        "machine": machine(),
        "versions": versions(packages),
        "commit": commit(),
    }
    print(json.dumps({**line, **({"notes": dict(notes)} if notes else {})}))


def machine() -> str:
    """Processor, cores, memory, and the load of this minute: numbers of a busy machine are worth less."""
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.machine())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python and of the packages named."""
    return {"python": platform.python_version(), **{package: importlib.metadata.version(package) for package in packages}}


def commit() -> str:
    """The commit checked out, with "+" when files differ from it; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
