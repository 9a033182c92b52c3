"""`run_dir/report.html`: one self-contained page with the plots of a run, finished or not."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.mistakes import Mistakes
from deploy.plot import Series, bar_chart, line_chart, number
from deploy.progress import Metrics, evaluations, read_all, surviving
from deploy.services import write_atomically
from learner.gateway.evaluation_result import words as evaluation_words

Read = Callable[[Metrics], Any]
NUM_SAMPLES = 24
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 920px; padding: 0 1em }
figure { display: inline-block; margin: 0 8px 16px 0; vertical-align: top } figcaption { font-size: 13px }
svg text { font-size: 10px; fill: #555 } table { border-collapse: collapse; margin: 0 0 1em }
td, th { border-bottom: 1px solid #ddd; padding: 2px 10px 2px 0; text-align: left; vertical-align: top }
td.text { font-family: ui-monospace, monospace; white-space: pre-wrap; max-width: 480px }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure over steps: a title and its lines.

    Example: `Chart(title="Reward", lines={"mean": lambda line: line.get("reward_mean")})`
    """

    title: str
    lines: dict[str, Read]  # a line's value at a step; None: no point


def _at(*path: str) -> Read:
    """Reader of a nested key; None where it is absent."""

    def read(line: Metrics) -> Any:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return read


def _mean_staleness(line: Metrics) -> float | None:
    tokens = line.get("staleness") or {}
    total = sum(tokens.values())
    return sum(int(age) * count for age, count in tokens.items()) / total if total else None


CHARTS = (
    Chart(title="Reward", lines={"mean": _at("reward_mean"), "standard deviation": _at("reward_std")}),
    Chart(title="Staleness of trained tokens (steps)", lines={"mean": _mean_staleness, "oldest": _at("staleness_max")}),
    Chart(title="Idle share", lines={"learner": _at("trainer_idle_share"), "replicas": _at("replica_idle_share")}),
    Chart(title="Tokens a second", lines={"drawn": _at("generated_tokens_per_s"), "trained": _at("trained_tokens_per_s")}),
    Chart(title="Seconds a step", lines={name: _at("seconds", name) for name in ("total", "wait", "train", "snapshot", "push")}),
    Chart(title="Loss", lines={"loss": _at("loss")}),
    Chart(title="Gradient norm", lines={"before clipping": _at("grad_norm")}),
    Chart(title="Mismatch of behaviour and learner (KL, k3)", lines={"k3": _at("mismatch_kl")}),
    Chart(title="Clipped tokens (share)", lines={"high": _at("clip_fraction_high"), "low": _at("clip_fraction_low"), "dual": _at("clip_fraction_dual")}),
    Chart(title="Entropy (estimate, nats)", lines={"entropy": _at("entropy_estimate")}),
    Chart(title="Completion length (tokens)", lines={"mean": _at("completion_tokens_mean"), "longest": _at("completion_tokens_max")}),
    Chart(title="Groups", lines={"open": _at("open_groups"), "waiting": _at("waiting_groups")}),
    Chart(title="Replicas", lines={"attending": _at("num_replicas")}),
    Chart(title="Learning rate", lines={"lr": _at("lr")}),
)


HELD_OUT = Chart(
    title="Held-out score",
    lines={
        "score": _at("evaluation", "score"),
        "one standard error above": lambda line: _bound(line, 1.0),
        "one below": lambda line: _bound(line, -1.0),
    },
)  # fmt: skip


def write(run_dir: Path) -> Path:
    """Writes the page and returns its path. Raises Mistakes when the folder holds no run."""
    if not run_dir.is_dir():
        raise Mistakes([f"{run_dir}: no such folder; give the folder of a run"])
    lines = read_all(run_dir / "metrics.jsonl")
    if not lines and not (run_dir / "resolved").is_dir():
        raise Mistakes([f"{run_dir}: holds neither metrics.jsonl nor resolved/: it is no run folder; give the folder of a run"])
    file = run_dir / "report.html"
    write_atomically(file, page(run_dir, lines))
    return file


def page(run_dir: Path, lines: list[Metrics]) -> str:
    """The whole page as text."""
    steps = surviving(lines)
    body = [
        f"<h1>{html.escape(run_dir.name)}</h1>",
        _summary(run_dir, lines, steps),
        _held_out(evaluations(lines)),
        *[chart(each, steps) for each in CHARTS],
        _staleness(steps),
        _dropped(steps),
        _by_reason(steps, "unusable", "Samples of trained groups that could not be used, by reason"),
        _by_reason(steps, "fallbacks", "Samples trained on with filter.unscored_value instead of a score, by reason"),
        _accuracy(run_dir),
        _samples(run_dir),
        _configuration(run_dir),
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(run_dir.name)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n"


def chart(each: Chart, steps: list[Metrics]) -> str:
    """The figure, or empty text when no step has a value for it."""
    series = []
    for name, read in each.lines.items():
        points = tuple((float(line["step"]), float(value)) for line in steps if isinstance(value := read(line), int | float))
        series.append(Series(name=name, points=points))
    return line_chart(each.title, series)


def _table(rows: Iterable[tuple[object, ...]], header: tuple[str, ...] = ()) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f'<td class="{"text" if len(str(cell)) > 40 else ""}">{html.escape(str(cell))}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _summary(run_dir: Path, lines: list[Metrics], steps: list[Metrics]) -> str:
    if not steps:
        return "<p>No step has been made yet.</p>"
    last = steps[-1]
    minutes = (last["time_s"] - steps[0]["time_s"]) / 60 if "time_s" in last else 0.0
    rows: list[tuple[object, ...]] = [
        ("steps", len(steps)),
        ("lines of steps (more than steps: steps made again after a rollback)", sum("evaluation" not in line for line in lines)),
        ("minutes from first to last step", number(minutes)),
        ("last version, lineage", f"{last.get('version')}, {last.get('lineage')}"),
        ("reward, first and last step", f"{number(steps[0].get('reward_mean') or 0)}, {number(last.get('reward_mean') or 0)}"),
        ("groups leased, trained, dropped, open", _groups(last)),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S")),
    ]
    result = run_dir / "result.json"
    if result.is_file():
        rows += [(key.replace("_", " "), value) for key, value in json.loads(result.read_text()).items()]
    return _table(rows)


def _groups(last: Metrics) -> str:
    """After the last step. Its line was written when its batch was taken, so the groups of that batch count as open there."""
    closed = len(last.get("groups") or ())
    return f"{last.get('leased_groups')}, {last.get('trained_groups', 0) + closed}, {sum((last.get('dropped') or {}).values())}, {last.get('open_groups', 0) - closed}"


def _staleness(steps: list[Metrics]) -> str:
    tokens: dict[int, int] = {}
    for line in steps:
        for age, count in (line.get("staleness") or {}).items():
            tokens[int(age)] = tokens.get(int(age), 0) + count
    return bar_chart("Trained tokens by staleness (steps)", [(str(age), float(count)) for age, count in sorted(tokens.items())])


def _bound(line: Metrics, errors: float) -> float | None:
    """The score with so many standard errors added; None where there is no error."""
    score, error = _at("evaluation", "score")(line), _at("evaluation", "standard_error")(line)
    return None if score is None or error is None else score + errors * error


def _held_out(lines: list[Metrics]) -> str:
    """Evaluations beside training: a figure, and each with its errors, counts and versions; empty without any."""
    if not lines:
        return ""
    rows = [(line["step"], line["version"], _estimates(line["evaluation"]), *(line["evaluation"][name] for name in ("num_prompts", "scored", "unscored", "lost")), _versions(line)) for line in lines]
    return chart(HELD_OUT, lines) + _table(rows, ("step", "version", "score ± standard error", "prompts", "scored", "unscored", "lost", "tokens by version"))


def _estimates(found: Metrics) -> str:
    return evaluation_words(found).rpartition(" (")[0]


def _versions(line: Metrics) -> str:
    return ", ".join(f"{version}: {count}" for version, count in line["evaluation"]["tokens_by_version"].items())


def _dropped(steps: list[Metrics]) -> str:
    dropped = (steps[-1].get("dropped") or {}) if steps else {}
    return bar_chart("Groups dropped so far, by reason", [(reason, float(count)) for reason, count in sorted(dropped.items())])


def _by_reason(steps: list[Metrics], key: str, title: str) -> str:
    """Counts of all steps together: samples that had no part in the loss, or that fell back."""
    reasons: dict[str, int] = {}
    for line in steps:
        for reason, count in (line.get(key) or {}).items():
            reasons[reason] = reasons.get(reason, 0) + count
    return bar_chart(title, [(reason, float(count)) for reason, count in sorted(reasons.items())])


def _accuracy(run_dir: Path) -> str:
    """Held-out accuracy of each evaluation that the folder holds."""
    bars = []
    for file in sorted((run_dir / "evaluations").glob("*.jsonl"), key=lambda file: file.stat().st_mtime):
        scores = [float(answer["score"]) for answer in read_all(file)]
        bars.append((file.stem, sum(score >= 1 for score in scores) / len(scores)))
    return bar_chart("Held-out accuracy", bars)


def _samples(run_dir: Path) -> str:
    samples = read_all(run_dir / "samples.jsonl")
    if not samples:
        return ""
    chosen = samples[:: max(1, len(samples) // NUM_SAMPLES)][:NUM_SAMPLES]
    rows = [(sample["step"], sample["group_id"], sample["reward"], ", ".join(map(str, sample.get("versions", ()))), sample["text"]) for sample in chosen]
    return "<h2>Trajectories</h2>" + _table(rows, ("step", "group", "reward", "versions", "text"))


def _configuration(run_dir: Path) -> str:
    files = sorted((run_dir / "resolved").rglob("*.json"))
    parts = [f"<details><summary>{html.escape(str(file.relative_to(run_dir)))}</summary><pre>{html.escape(file.read_text())}</pre></details>" for file in files]
    return "<h2>Configuration</h2>" + "".join(parts) if parts else ""
