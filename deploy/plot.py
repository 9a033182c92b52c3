"""Line and bar charts as inline SVG text: pure, no library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 26
COLORS = ("#1f6f8b", "#c8553d", "#588157", "#8d6a9f", "#b08968")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of one line.

    Example: `Series(name="reward", points=((1.0, 0.1), (2.0, 0.3)))`
    """

    name: str
    points: tuple[tuple[float, float], ...]  # (x, y), finite, x rising


def line_chart(title: str, series: Sequence[Series]) -> str:
    """One figure; series without points are left out. Empty text where none has any."""
    drawn = [each for each in series if each.points]
    if not drawn:
        return ""
    xs = [x for each in drawn for x, _ in each.points]
    ys = [y for each in drawn for _, y in each.points]
    x_axis, y_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT), _Axis(*_padded(min(ys), max(ys)), HEIGHT - BOTTOM, TOP)
    parts = [_grid(x_axis, y_axis)]
    for each, color in zip(drawn, _colors(len(drawn)), strict=True):
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in each.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if len(each.points) == 1:
            x, y = each.points[0]
            parts.append(f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3" fill="{color}"/>')
    return _figure(title, "".join(parts), [each.name for each in drawn] if len(drawn) > 1 else [])


def bar_chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """One figure with a labelled bar each; empty text without bars."""
    if not bars:
        return ""
    y_axis = _Axis(0.0, max(value for _, value in bars) or 1.0, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    parts = [_grid(None, y_axis)]
    for index, (label, value) in enumerate(bars):
        x, y = LEFT + index * step, y_axis.at(value)
        parts.append(f'<rect x="{x + 0.15 * step:.1f}" y="{y:.1f}" width="{0.7 * step:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLORS[0]}"/>')
        parts.append(f'<text x="{x + step / 2:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(label)}</text>')
        parts.append(f'<text x="{x + step / 2:.1f}" y="{max(y - 3, 9):.1f}" text-anchor="middle">{number(value)}</text>')
    return _figure(title, "".join(parts), [])


def number(value: float) -> str:
    """Three significant digits: 1234567 is "1.23e+06", 0.5 is "0.5"."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e5 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Axis:
    """Data from low to high on pixels from start to end."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the range, about four."""
        span = (self.high - self.low) or 1.0
        size = 10.0 ** math.floor(math.log10(span / 4))
        size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 5)
        first = math.ceil(self.low / size - 1e-9)
        return [index * size for index in range(first, math.floor(self.high / size + 1e-9) + 1)]


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return (0.0 if 0 <= low <= margin * 4 else low - margin), high + margin


def _grid(x_axis: _Axis | None, y_axis: _Axis) -> str:
    lines = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_axis.at(y):.1f}" y2="{y_axis.at(y):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 5}" y="{y_axis.at(y) + 3:.1f}" text-anchor="end">{number(y)}</text>'
        for y in y_axis.ticks()
    ]
    if x_axis:
        lines += [f'<text x="{x_axis.at(x):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{number(x)}</text>' for x in x_axis.ticks()]
    return "".join(lines)


def _colors(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _figure(title: str, body: str, legend: list[str]) -> str:
    keys = "".join(f'<span style="color:{color}">&#9632; {html.escape(name)}</span> ' for name, color in zip(legend, _colors(len(legend)), strict=True))
    return (
        f'<figure><figcaption><b>{html.escape(title)}</b> {keys}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(title)}">{body}</svg></figure>'
    )
