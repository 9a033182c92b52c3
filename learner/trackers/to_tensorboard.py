"""Event files for TensorBoard, by its own writer: no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class ToTensorboard:
    """Example: `ToTensorboard(run_dir / "tensorboard").log(1, {"loss": 0.5}, 0.0)`"""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=summary))
        self._writer.flush()  # a full disk raises here and not in the writer's own thread

    def went_back(self, step: int) -> None:
        """TensorBoard forgets points from that step on when it reads a session's start."""
        self._writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        self._writer.close()
