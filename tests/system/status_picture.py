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

SIZE = 14  # of a character, in points


def draw(shown: RenderableType, width: int, out: Path) -> None:
    """Every character in its cell, in a font whose characters are all equally wide, as terminals do."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False)
    lines = list(Segment.split_lines(console.render(shown)))
    folder = Path(get_data_path()) / "fonts" / "ttf"
    plain, bold = (ImageFont.truetype(str(folder / f"DejaVuSansMono{kind}.ttf"), SIZE) for kind in ("", "-Bold"))
    cell, high = plain.getlength("M"), SIZE + 4
    picture = Image.new("RGB", (round(cell * width) + 20, high * len(lines) + 20), tuple(MONOKAI.background_color))
    pen = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            for character in segment.text:
                pen.text((10 + column * cell, 10 + row * high), character, font=bold if segment.style and segment.style.bold else plain, fill=_colour(segment.style))
                column += 1
    picture.save(out)


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
