"""The page of `headrace status --watch`: one screen of a running run. Pure: made of the gateway's answer and of lines of metrics.jsonl."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.counts import counted
from deploy.progress import Metrics
from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2

BARS = "▁▂▃▄▅▆▇█"
NUM_POINTS = 40  # of a line of bars
BESIDE_CURVE = 38  # characters of a line that are not bars: border, name, bounds
WIDE = 100  # characters, from which on two panels stand beside each other
SILENT_S = 5.0  # since a replica was heard, from which on that is marked
COLOURS = {"serving": "green", "waiting": "cyan", "starting": "cyan", "draining": "yellow", "stale": "bold red", "gone": "red"}
SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One panel, or two beside each other. Example: `Part(name="replicas", rank=3, shown=panel)`"""

    name: str
    rank: int  # 0: stays longest on a page that is too short
    shown: RenderableType


def page(status: learner_pb2.GetStatusResponse, steps: Sequence[Metrics], *, num_steps: int | None, time: str, width: int = 120, height: int | None = None) -> RenderableType:
    """width, height: of the terminal, in characters; None: as high as it gets. steps: the surviving ones, in order; none where the run folder is not on this machine. num_steps: of the whole run; None: not known."""
    parts = [Part(name="run", rank=0, shown=_head(status, num_steps, time)), Part(name="alarms", rank=1, shown=_alarms(status))]
    if not steps:
        parts.append(Part(name="step", rank=2, shown=Text("no step yet", style="dim")))
    elif width < WIDE:
        parts += [Part(name="step", rank=2, shown=_newest(steps)), Part(name="curves", rank=5, shown=_curves(steps, width))]
    else:
        parts.append(Part(name="step and curves", rank=2, shown=_beside(_newest(steps), _curves(steps, width // 2))))
    if width < WIDE:
        parts += [Part(name="groups", rank=4, shown=_groups(status)), Part(name="staleness", rank=6, shown=_staleness(status))]
    else:
        parts.append(Part(name="groups and staleness", rank=4, shown=_beside(_groups(status), _staleness(status))))
    parts.append(Part(name="replicas", rank=3, shown=_replicas(status)))
    return Group(*(part.shown for part in parts)) if height is None else _fitted(parts, width, height)


def _fitted(parts: list[Part], width: int, height: int) -> RenderableType:
    """What fits into so many lines, the most important first; the last line says what does not."""
    console = Console(width=width, file=io.StringIO())
    lines = {part.name: len(console.render_lines(part.shown)) for part in parts}
    shown, left = {part.name for part in parts}, list[str]()
    for part in sorted(parts, key=lambda part: -part.rank)[:-1]:
        if sum(lines[name] for name in shown) + bool(left) <= height:
            break
        shown.remove(part.name)
        left.append(part.name)
    words = [Text(f"a higher window shows: {', '.join(part.name for part in parts if part.name in left)}", style="dim", no_wrap=True, overflow="ellipsis")] if left else []
    return Group(*(part.shown for part in parts if part.name in shown), *words)


def spark(values: Sequence[float | None], most: int = NUM_POINTS) -> str:
    """The last values as bars from their lowest to their highest. Example: `spark([0, 1, 2])` is "▁▅█"; a missing value is a blank."""
    shown = values[-most:]
    known = [value for value in shown if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = (high - low) or 1.0
    return "".join(" " if value is None else BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] if high > low else BARS[0] for value in shown)


def _beside(left: RenderableType, right: RenderableType) -> RenderableType:
    """Two halves of the page."""
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _head(status: learner_pb2.GetStatusResponse, num_steps: int | None, time: str) -> RenderableType:
    text = Text.assemble((PurePath(status.run_dir).name or status.run_id, "bold"), f"   {'finished' if status.finished else 'running'}   step ", (str(status.policy_step), "bold"))
    text.append(f"{f' of {num_steps}' if num_steps else ''}   version {status.newest_version}   lineage {status.lineage}   {time}")
    lines = [text, Text(status.run_dir, style="dim", overflow="ellipsis", no_wrap=True)]
    bar = [ProgressBar(total=num_steps, completed=min(num_steps, status.policy_step))] if num_steps else []
    return Panel(Group(*lines, *bar), title="Headrace")


def _alarms(status: learner_pb2.GetStatusResponse) -> RenderableType:
    lines = [Text.assemble((alarm.name, SEVERITIES.get(alarm.severity, "")), f"  {alarm.words}  ", (f"for {_time(alarm.since_s)}", "dim")) for alarm in status.alarms]
    if status.alarm:
        lines.append(Text(f"training waits: {status.alarm}", style="bold red"))
    if status.verdict:
        lines.append(Text.assemble(("last diagnosis  ", "dim"), (status.verdict, "bold" if status.alarms else "dim")))
        lines.append(Text(f"                {status.diagnosis_dir}", style="dim"))
    colour = "red" if status.alarms or status.alarm else "green"
    return Panel(Group(*lines) if lines else Text("no alarm fires", style="green"), title="Alarms", border_style=colour)


def _newest(steps: Sequence[Metrics]) -> RenderableType:
    line, table = steps[-1], Table.grid(padding=(0, 2))
    seconds = line.get("seconds", {})
    pieces = ", ".join(f"{name} {seconds[name]:.1f}" for name in ("wait", "train", "snapshot", "save", "push") if seconds.get(name, 0) >= 0.05)
    for name, value in (
        ("reward", f"{_number(line.get('reward_mean'))} ± {_number(line.get('reward_std'))}"),
        ("tokens a second", f"{_number(line.get('generated_tokens_per_s'))} drawn, {_number(line.get('trained_tokens_per_s'))} trained"),
        ("idle", f"learner {line.get('trainer_idle_share', 0):.0%}, replicas {line.get('replica_idle_share', 0):.0%}"),
        ("seconds", f"{seconds.get('total', 0):.1f}: {pieces or '-'}"),
        ("KL engine, learner", f"{_number(line.get('mismatch_kl'))} nats"),
        ("length", f"{_number(line.get('completion_tokens_mean'))} tokens, {line.get('truncated_share', 0):.0%} cut off"),
    ):
        table.add_row(Text(name, style="dim"), value)
    return Panel(table, title=f"Step {line['step']}")


def _curves(steps: Sequence[Metrics], width: int) -> RenderableType:
    """As many of the last steps as have room beside a curve's name and bounds."""
    most = max(8, min(NUM_POINTS, len(steps), width - BESIDE_CURVE))
    table = Table.grid(padding=(0, 2))
    for name, read in (("reward", _at("reward_mean")), ("loss", _at("loss")), ("entropy", _at("entropy_estimate")), ("seconds", lambda line: line.get("seconds", {}).get("total")), ("tokens/s drawn", _at("generated_tokens_per_s")), ("gradient norm", _at("grad_norm"))):
        values = [read(line) for line in steps[-most:]]
        known = [value for value in values if value is not None]
        table.add_row(Text(name, style="dim"), Text(spark(values, most), style="cyan", no_wrap=True), Text(f"{_number(min(known))} to {_number(max(known))}" if known else "-", style="dim", no_wrap=True))
    return Panel(table, title=f"Last {min(len(steps), most)} steps")


def _groups(status: learner_pb2.GetStatusResponse) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("open", style="dim"), ProgressBar(total=max(1, status.max_open), completed=status.num_open, width=20), f"{status.num_open} of at most {status.max_open}")
    table.add_row(Text("complete, waiting", style="dim"), "", str(status.num_waiting))
    table.add_row(Text("trained", style="dim"), "", str(status.num_trained))
    dropped = counted(status.num_dropped) or "none"
    table.add_row(Text("dropped", style="dim"), "", dropped)
    unusable = counted(status.num_unusable)
    if unusable:
        table.add_row(Text("unusable samples", style="dim"), "", Text(unusable, style="yellow"))
    return Panel(table, title="Groups")


def _staleness(status: learner_pb2.GetStatusResponse) -> RenderableType:
    tokens, table = dict(status.trained_tokens_by_staleness), Table.grid(padding=(0, 2))
    total = sum(tokens.values())
    for age, count in sorted(tokens.items()):
        table.add_row(Text(f"{age} step{'' if age == 1 else 's'}", style="dim"), ProgressBar(total=total, completed=count, width=20), f"{count / total:.0%}")
    return Panel(table if total else Text("no token trained yet", style="dim"), title=f"Staleness of trained tokens, bound {status.max_staleness}")


def _replicas(status: learner_pb2.GetStatusResponse) -> RenderableType:
    table = Table(expand=True, box=None, header_style="dim")
    for name, justify in (("replica", "left"), ("state", "left"), ("version", "right"), ("requests", "right"), ("groups", "right"), ("tokens", "right"), ("heard", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for one in status.replicas:
        state = rollout_pb2.ReplicaState.Name(one.state).removeprefix("REPLICA_STATE_").lower() if one.attending else "gone"
        behind = status.newest_version - one.loaded_version
        version = f"{one.loaded_version}{f' (-{behind})' if behind > 0 and one.attending else ''}"
        heard = Text(f"{_time(one.silent_s)} ago", style="yellow" if one.silent_s > SILENT_S else "")
        table.add_row(one.replica_id, Text(state, style=COLOURS.get(state, "")), version, str(one.num_running), str(one.num_leases), f"{one.num_tokens:,}", heard)
    details = [Text(f"{one.replica_id}: {one.detail}", style="yellow") for one in status.replicas if one.detail]
    return Panel(Group(table, *details) if status.replicas else Text("none attends", style="yellow"), title=f"Replicas ({sum(one.attending for one in status.replicas)})")


def _at(key: str) -> Any:
    return lambda line: line.get(key)


def _number(value: float | None) -> str:
    """Three digits that count, and none of an exponent where it can be read without one."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
