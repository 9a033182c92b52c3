"""Opens the journal of a run, whichever way it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.audit import segments, streams
from deploy.audit.entry import Entry
from deploy.audit.findings import Findings


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """beginning(): its first part that is still there, and whether that is the run's start. read(): all entries in order."""

    beginning: Callable[[], tuple[str, bool]]
    read: Callable[[Findings], Iterator[Entry]]


def open_journal(run_dir: Path, config: dict[str, Any]) -> Journal:
    """config: the run's resolved configuration. Raises ValueError when there is no journal."""
    settings = config.get("journal", {})
    if settings.get("backend", "segments") == "redis":
        run_id, client = (run_dir / "run_id").read_text().strip(), streams.connect(settings["url"])
        return Journal(beginning=lambda: streams.beginning(client, run_id), read=lambda findings: streams.read(client, run_id, findings))
    return Journal(beginning=lambda: segments.beginning(run_dir), read=lambda findings: segments.read(run_dir, findings))
