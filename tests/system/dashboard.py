"""The Grafana dashboard's panels asked of a Prometheus, and drawn: their titles, units and legends as headrace.json has them.

    python -m tests.system.dashboard http://127.0.0.1:9090 RUN OUT.png [--minutes 10]

Draws with matplotlib what Grafana would: no Grafana server is needed, and none is replaced by this; it is for looking at the figures themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from deploy.grafana.generate import FILE

RATE_INTERVAL = "30s"  # what Grafana would take: four scrapes or more
UNITS: dict[str, tuple[str, float]] = {"s": ("s", 1), "bytes": ("MiB", 2**20), "Bps": ("MiB/s", 2**20), "percentunit": ("%", 0.01), "watt": ("W", 1), "none": ("", 1)}
Series = list[tuple[str, list[tuple[float, float]]]]  # legend, (time, value)


def panels() -> Iterator[dict[str, Any]]:
    """Of the dashboard, rows left out."""
    yield from (panel for panel in json.loads(FILE.read_text())["panels"] if panel["type"] != "row")


def filled(expression: str, run: str) -> str:
    """A query as Grafana sends it."""
    return expression.replace("$run", run).replace("$__rate_interval", RATE_INTERVAL)


def legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def draw(ask: Callable[[str], list[dict[str, Any]]], run: str, out: Path) -> None:
    """Every panel that has data, three a row. ask: a range query's result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.dates import DateFormatter

    drawn: list[tuple[dict[str, Any], Series]] = []
    for panel in panels():
        series: Series = [(legend(target["legendFormat"], one["metric"]), [(float(at), float(value)) for at, value in one["values"]]) for target in panel["targets"] for one in ask(filled(target["expr"], run))]
        drawn.append((panel, series))
    num_rows = math.ceil(len(drawn) / 3)
    figure, axes = pyplot.subplots(num_rows, 3, figsize=(18, 3.0 * num_rows), squeeze=False)
    for ax in axes.flat[len(drawn) :]:
        ax.axis("off")
    for (panel, series), ax in zip(drawn, axes.flat, strict=False):
        name, scale = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        ax.set_title(panel["title"] + (f" ({name})" if name else ""), fontsize=9)
        ax.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))  # type: ignore[no-untyped-call]
        ax.tick_params(labelsize=7)
        if panel["type"] == "state-timeline":
            _states(ax, series)
            continue
        for words, points in series:
            ax.plot([datetime.fromtimestamp(at) for at, _ in points], [value / scale for _, value in points], label=words, linewidth=1.2)
        if series:
            ax.legend(fontsize=6, loc="upper left", ncols=1 if len(series) < 7 else 2, framealpha=0.6)
        else:
            ax.text(0.5, 0.5, "no data", ha="center", transform=ax.transAxes)
    figure.tight_layout()
    figure.savefig(out, dpi=70)


def _states(ax: Any, series: Series) -> None:
    """A row a series, dark where it is 1."""
    for row, (_, points) in enumerate(series):
        ax.scatter([datetime.fromtimestamp(at) for at, _ in points], [row] * len(points), c=["firebrick" if value else "lightgreen" for _, value in points], marker="|", s=60)
    ax.set_yticks(range(len(series)), [words for words, _ in series], fontsize=6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()

    def ask(expression: str) -> list[dict[str, Any]]:
        end = time.time()
        query = urllib.parse.urlencode({"query": expression, "start": end - 60 * options.minutes, "end": end, "step": "2"})
        with urllib.request.urlopen(f"{options.url}/api/v1/query_range?{query}", timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])

    draw(ask, options.run, options.out)


if __name__ == "__main__":
    main()
