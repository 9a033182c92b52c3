"""Where a stream's longest gap comes from: the engine, the way to the front end, the event loop, or garbage collection.

    watch = Stalls(engine)                       # an AsyncLLM, before the first request
    watch.reset(); ...; watch.found()            # of one window

engine_ms    longest time between two steps that drew tokens, by the engine process's own clock
arrival_ms   longest time between two such steps' arrival in this process
late_ms      longest time from a step's end in the engine to its arrival here
loop_ms      longest time for which the event loop did nothing else; `where`: what it was doing, innermost frame first
gc_ms        longest garbage collection of this process; num_gc_full: full ones

`ends` has the time of every step's end, for benchmarks/_phases.py. Where `stacks_wanted` is set, the next long silence of the engine is looked
into: what every thread of the processes below this one does then (protos/stacks.py) is in `stacks`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from typing import Any

from protos import stacks

_BEAT_S = 0.002
_LATE_S = 0.04  # a beat this late is looked into
_FRAMES = 6
_SILENT_STEPS, _SILENT_S = 4, 0.03  # a silence of so many median steps, and of so long, is looked into
_STACK_CHARS = 6000  # kept of one process's answer


class Stalls:
    """Watches one AsyncLLM and this thread, which must run the event loop. `loop_beat` is to be run as a task."""

    def __init__(self, engine: Any) -> None:
        self._main = threading.get_ident()
        self._beat_at = time.monotonic()
        self._gc_began = 0.0
        self._over = threading.Event()
        self.stacks_wanted = 0  # so many silences more
        self.stacks: list[str] = []
        self.ends: list[float] = []  # of steps that drew tokens, by the engine's clock, which is this machine's
        self._last_step = self._last_arrival = 0.0
        self.reset()
        put = engine.engine_core.outputs_queue.put_nowait

        def watched(outputs: Any) -> None:
            if getattr(outputs, "outputs", ()):
                self._step(outputs.timestamp, time.monotonic())
            put(outputs)

        engine.engine_core.outputs_queue.put_nowait = watched
        gc.callbacks.append(self._collection)
        threading.Thread(target=self._look, name="stalls", daemon=True).start()

    def close(self) -> None:
        """Watches no more."""
        self._over.set()
        gc.callbacks.remove(self._collection)

    def reset(self) -> None:
        """Begins a window. Its first step is counted from the last one before, so that no silence falls between two windows."""
        self._steps_s: list[float] = []
        self._arrivals_s: list[float] = []
        self._late_s = self._loop_s = self._gc_s = 0.0
        self._num_full = 0
        self._where = ""
        self.ends = self.ends[-1:]
        self.stacks, self.stacks_wanted = [], 0

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
        self.ends.append(ended)
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
        while not self._over.wait(_LATE_S / 8):
            self._look_at_engine()
            late_s = time.monotonic() - self._beat_at
            longest_s = longest_s if self._where else 0.0
            if late_s > max(_LATE_S, longest_s) and (frame := sys._current_frames().get(self._main)) is not None:
                longest_s = late_s
                frames = traceback.extract_stack(frame)[-_FRAMES:][::-1]
                self._where = f"{1e3 * late_s:.0f} ms: " + " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames)

    def _look_at_engine(self) -> None:
        """Asks the processes below this one what they do, once the engine has been silent for long."""
        steps = self._steps_s[-200:]
        if not self.stacks_wanted or len(steps) < 20:
            return
        silent_s = time.monotonic() - self._last_arrival
        if silent_s < max(_SILENT_S, _SILENT_STEPS * sorted(steps)[len(steps) // 2]):
            return
        self.stacks_wanted -= 1
        below = [pid for pid in stacks.family(os.getpid()) if pid != os.getpid()]
        said = [f"{process.name}\n{process.text[:_STACK_CHARS]}" for process in stacks.ask(below, limit_s=0.5) if "not asked" not in process.text]
        self.stacks.append(f"silent for {1e3 * silent_s:.0f} ms\n" + "\n".join(said))
