"""`headrace status --watch` on a terminal: one page, made anew every second until the run is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from deploy.mistakes import Mistakes
from deploy.progress import Metrics, read_all, surviving
from deploy.status import at_rest
from deploy.status_page import page
from protos.learner.v1alpha1 import learner_pb2

EVERY_S = 1.0
PATIENCE_S = 60.0  # for a gateway that is being started again


def watch(ask: Callable[[], learner_pb2.GetStatusResponse], target: str, console: Console | None = None) -> None:
    """Until the run is over or nobody answers for a minute. Raises Mistakes where nobody answers from the start."""
    answer, answered_s = ask(), time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not answer.finished:
            live.update(screen(answer, time.monotonic() - answered_s, live.console.width, live.console.height), refresh=True)
            time.sleep(EVERY_S)
            try:
                answer, answered_s = ask(), time.monotonic()
            except Mistakes:
                if at_rest(target) and time.monotonic() - answered_s > PATIENCE_S:
                    raise
    console = console or Console()
    console.print(screen(answer, 0.0, console.width))


def screen(answer: learner_pb2.GetStatusResponse, unanswered_s: float, width: int, height: int | None = None) -> RenderableType:
    """The page of an answer, with what the run folder tells where it is on this machine."""
    run_dir = Path(answer.run_dir)
    clock = time.strftime("%H:%M:%S") if unanswered_s < 3 else f"no answer for {unanswered_s:.0f} s"
    return page(answer, steps_in(run_dir), num_steps=wanted_steps(run_dir), time=clock, width=width, height=height)


def steps_in(run_dir: Path) -> list[Metrics]:
    """The surviving steps; none where the folder is on another machine."""
    return surviving(read_all(run_dir / "metrics.jsonl"))


def wanted_steps(run_dir: Path) -> int | None:
    """Of the whole run, as its resolved configuration says."""
    try:
        return int(json.loads((run_dir / "resolved" / "learner.json").read_text())["steps"])
    except (OSError, ValueError, KeyError):
        return None
