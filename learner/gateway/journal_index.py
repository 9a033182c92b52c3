"""Where a sample's payload lies in the segmented log, by identity: an SQLite file beside the segments.

The log is the truth. The index spares a restarted gateway the reading of what its cut covers; it may be missing, behind, or
broken, and is then made again from the log, from where it stood or from the beginning.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from learner.gateway.appends import Key
from learner.gateway.segments import Position

_log = logging.getLogger("headrace.gateway.journal")
NAME = "index.sqlite"
SCHEMA = 1
_BATCH = 2048  # entries between two writes; a crash costs the reading of so many
_ROWS = 256  # in one statement: it is one call, while executemany would ask for the interpreter's lock again after each row
_INSERT = "INSERT OR REPLACE INTO payloads VALUES "


class Index:
    """One opened index. Not for several threads at once: the journal's writer thread, or whoever holds the journal still.

    reached: the last entry of the log that it knows of; None: it knows nothing. broken: it could not be written (a full disk), so it
    stays behind until the journal is opened again.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._rows: list[tuple[str, int, int, int]] = []
        self._num_noted = 0
        self.reached: Position | None = None
        self.broken = False
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            _log.warning("index %s cannot be used (%s); it is made again from the log", self._path, error)
            self.reset()

    def reset(self) -> None:
        """Begins again with nothing."""
        self.close(flush=False)
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(NAME + suffix).unlink(missing_ok=True)
        self._rows, self.reached = [], None
        self._open()

    def note(self, position: Position, key: Key | None) -> None:
        """The next entry of the log; key: whose payload it has. Once it `is_behind`, it wants to be flushed."""
        self.reached = position
        self._num_noted += 1
        if key is not None:
            self._rows.append((*key, position.segment, position.offset))

    @property
    def is_behind(self) -> bool:
        return self._num_noted >= _BATCH

    def find(self, keys: Iterable[Key]) -> dict[Key, Position] | None:
        """Positions of the keys that are known; None: it is broken, ask the log."""
        self.flush()
        if self.broken:
            return None
        query = "SELECT segment, offset FROM payloads WHERE group_id = ? AND sample_index = ?"
        rows = ((key, self._database.execute(query, key).fetchone()) for key in keys)
        return {key: Position(*row) for key, row in rows if row is not None}

    def forget(self, before: int) -> None:
        """Rows of segments below a number."""
        self.flush()
        try:
            with self._database:
                self._database.execute("DELETE FROM payloads WHERE segment < ?", (before,))
        except sqlite3.Error as error:
            self._give_up(error)

    def flush(self) -> None:
        """What was noted is in the file; no fsync, since the log can give it again."""
        rows, self._rows, self._num_noted = self._rows, [], 0
        if self.reached is None or self.broken:
            return
        try:
            with self._database:  # rows and mark in one transaction: a file that is behind is right as far as it goes
                for first in range(0, len(rows), _ROWS):
                    some = rows[first : first + _ROWS]
                    self._database.execute(_INSERT + ", ".join(["(?, ?, ?, ?)"] * len(some)), [value for row in some for value in row])
                self._database.execute("INSERT OR REPLACE INTO reached VALUES (0, ?, ?)", (self.reached.segment, self.reached.offset))
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error) -> None:
        self.broken = True
        _log.warning("index %s cannot be written (%s); it stays behind until the next start, which reads more of the log", self._path, error)

    def close(self, *, flush: bool = True) -> None:
        if hasattr(self, "_database"):
            if flush:
                self.flush()
            self._database.close()

    def _open(self) -> None:
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        schema = self._database.execute("PRAGMA user_version").fetchone()[0]
        if schema not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"its schema is {schema}, this program makes {SCHEMA}")
        if not schema:
            self._database.executescript(
                "CREATE TABLE IF NOT EXISTS payloads (group_id TEXT, sample_index INTEGER, segment INTEGER, offset INTEGER, PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;"
                "CREATE TABLE IF NOT EXISTS reached (id INTEGER PRIMARY KEY, segment INTEGER, offset INTEGER);"
                f"PRAGMA user_version = {SCHEMA};"
            )
        row = self._database.execute("SELECT segment, offset FROM reached").fetchone()
        self._database.execute("SELECT count(*) FROM (SELECT 1 FROM payloads LIMIT 1)").fetchone()
        self.reached = Position(*row) if row else None
