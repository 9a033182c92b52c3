"""The page of `headrace status --watch` of a running run as a picture, to look at it without a terminal.

    python -m tests.system.status_picture RUN_DIR OUT.png [--width 80]
"""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path
from typing import Any

from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import MONOKAI

from deploy.status import address_of, fetch, security_of
from deploy.watching import screen

CELL, LINE = 8.43, 16.5  # width and height of a character of 14 pixels


def draw(shown: RenderableType, width: int, out: Path) -> None:
    """Every character in its cell, in a font whose characters are all equally wide, as terminals do."""
    from matplotlib.figure import Figure

    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
    lines = list(Segment.split_lines(console.render(shown)))
    wide, high = CELL * width + 20, LINE * len(lines) + 20
    figure = Figure(figsize=(wide / 100, high / 100), dpi=100, facecolor=_hex(MONOKAI.background_color))
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            weight = "bold" if segment.style and segment.style.bold else "normal"
            for character in segment.text:
                place = ((10 + column * CELL) / wide, 1 - (10 + (row + 0.8) * LINE) / high)
                figure.text(*place, character, family="DejaVu Sans Mono", fontsize=14 * 0.72, weight=weight, color=_hex(_colour(segment.style)), parse_math=False)
                column += 1
    figure.savefig(out)


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _colour(style: Style | None) -> tuple[int, int, int]:
    colour: Any = style.color.get_truecolor(MONOKAI) if style and style.color and style.color.type is not ColorSystem.STANDARD else MONOKAI.foreground_color
    red, green, blue = tuple(colour)
    return (red // 2 + 40, green // 2 + 40, blue // 2 + 40) if style and style.dim else (red, green, blue)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=120)
    options = parser.parse_args()
    answer = asyncio.run(fetch(address_of(options.run_dir), security_of(options.run_dir)))
    draw(screen(answer, 0.0, options.width), options.width, options.out)


if __name__ == "__main__":
    main()
