"""Where a stream's longest gap comes from: the engine, the way to the front end, the event loop, or garbage collection.

    watch = Stalls(engine)                       # an AsyncLLM, before the first request
    watch.reset(); ...; watch.found()            # of one window

engine_ms    longest time between two steps that drew tokens, by the engine process's own clock
arrival_ms   longest time between two such steps' arrival in this process
late_ms      longest time from a step's end in the engine to its arrival here
loop_ms      longest time for which the event loop did nothing else; `where`: what it was doing, innermost frame first
gc_ms        longest garbage collection of this process; num_gc_full: full ones
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from typing import Any

_BEAT_S = 0.002
_LATE_S = 0.04  # a beat this late is looked into
_FRAMES = 6


class Stalls:
    """Watches one AsyncLLM and this thread, which must run the event loop. `loop_beat` is to be run as a task."""

    def __init__(self, engine: Any) -> None:
        self._main = threading.get_ident()
        self._beat_at = time.monotonic()
        self._gc_began = 0.0
        self.reset()
        put = engine.engine_core.outputs_queue.put_nowait

        def watched(outputs: Any) -> None:
            if getattr(outputs, "outputs", ()):
                self._step(outputs.timestamp, time.monotonic())
            put(outputs)

        engine.engine_core.outputs_queue.put_nowait = watched
        gc.callbacks.append(self._collection)
        threading.Thread(target=self._look, name="stalls", daemon=True).start()

    def reset(self) -> None:
        self._last_step = self._last_arrival = 0.0
        self._steps_s: list[float] = []
        self._arrivals_s: list[float] = []
        self._late_s = self._loop_s = self._gc_s = 0.0
        self._num_full = 0
        self._where = ""

    def found(self) -> dict[str, Any]:
        """Of the time since `reset`. Milliseconds; excesses over the median."""
        def excess_ms(gaps: list[float]) -> float:
            return round(1e3 * (max(gaps) - sorted(gaps)[len(gaps) // 2]), 2) if gaps else 0.0

        return {
            "engine_excess_ms": excess_ms(self._steps_s), "step_ms": round(1e3 * sorted(self._steps_s)[len(self._steps_s) // 2], 2) if self._steps_s else 0.0, "arrival_excess_ms": excess_ms(self._arrivals_s),
            "late_ms": round(1e3 * self._late_s, 2), "loop_ms": round(1e3 * self._loop_s, 2), "gc_ms": round(1e3 * self._gc_s, 2), "num_gc_full": self._num_full, "where": self._where,
        }  # fmt: skip

    async def loop_beat(self) -> None:
        """Until cancelled."""
        import asyncio

        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            self._loop_s = max(self._loop_s, time.monotonic() - self._beat_at - _BEAT_S)

    def _step(self, ended: float, arrived: float) -> None:
        if self._last_step:
            self._steps_s.append(ended - self._last_step)
            self._arrivals_s.append(arrived - self._last_arrival)
        self._last_step, self._last_arrival = ended, arrived
        self._late_s = max(self._late_s, arrived - ended)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.monotonic()
            return
        self._gc_s = max(self._gc_s, time.monotonic() - self._gc_began)
        self._num_full += info["generation"] == 2

    def _look(self) -> None:
        """From another thread: what the loop's thread does while its beat is late."""
        longest_s = 0.0
        while True:
            time.sleep(_LATE_S / 2)
            late_s = time.monotonic() - self._beat_at
            longest_s = longest_s if self._where else 0.0
            if late_s > max(_LATE_S, longest_s) and (frame := sys._current_frames().get(self._main)) is not None:
                longest_s = late_s
                frames = traceback.extract_stack(frame)[-_FRAMES:][::-1]
                self._where = f"{1e3 * late_s:.0f} ms: " + " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames)
