"""Opens the journal that a run is configured with."""

from __future__ import annotations

from pathlib import Path

from learner.config import JournalConfig
from learner.gateway.appends import Appends
from learner.gateway.journal import Journal


def open_journal(config: JournalConfig, folder: Path, run_id: str) -> Appends:
    """Raises JournalLocked when another gateway has it open, ValueError or JournalDamaged when it cannot be used."""
    if config.backend == "segments":
        return Journal(folder, segment_bytes=config.segment_bytes)
    try:
        from learner.gateway.redis_journal import RedisJournal
    except ModuleNotFoundError as error:
        raise ValueError("journal.backend: redis needs the Python package `redis`; pip install redis, or use segments") from error
    return RedisJournal(config.url, run_id=run_id)
