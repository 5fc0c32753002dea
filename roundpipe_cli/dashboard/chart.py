"""A curve in characters, and one figure in large letters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from roundpipe_cli.dashboard.theme import Theme

# One figure in letters of five lines, to be read from afar.

_SHAPES = {
    "0": "### # # # # # # ###",
    "1": "  #   #   #   #   #",
    "2": "###   # ### #   ###",
    "3": "###   # ###   # ###",
    "4": "# # # # ###   #   #",
    "5": "### #   ###   # ###",
    "6": "### #   ### # # ###",
    "7": "###   #   #   #   #",
    "8": "### # # ### # # ###",
    "9": "### # # ###   # ###",
    "%": "# #   #  #  #   # #",
}
_ROWS = 5
_COLUMNS = 3


def large(text: str, width: int, height: int, theme: Theme) -> list[Text]:
    """`GPUs 94% busy` with the figure in five lines where there is room for them, otherwise in one."""
    before, figure, after = re.split(r"(\d+%)", text)
    across = 2 if 2 * (_COLUMNS + 1) * len(figure) + len(before) + len(after) <= width else 1
    if height < _ROWS or across * (_COLUMNS + 1) * len(figure) + len(before) + len(after) > width:
        return [Text(text.replace("%", " %"), style="bold")]
    lines = []
    for row in range(_ROWS):
        shapes = (_SHAPES[letter][4 * row : 4 * row + _COLUMNS].ljust(_COLUMNS) for letter in figure)
        cells = " ".join(shapes)
        drawn = "".join(theme.glyphs.full * across if cell == "#" else " " * across for cell in cells)
        middle = row == _ROWS // 2
        lines.append(
            Text.assemble(
                (before if middle else " " * len(before), "bold"),
                (drawn, theme.good if theme.has_colour else "bold"),
                (f" {after}" if middle else "", "bold"),
            )
        )
    return lines


Point = tuple[float, float]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot of a braille cell, by column and row (Unicode, block 2800)."""
LABEL_WIDTH = 7


def chart(points: Sequence[Point], marks: Sequence[Point], width: int, height: int, *, theme: Theme) -> list[Text]:
    """A curve of (step, value), ascending, and single marks, with axes, in `height` lines of `width` characters."""
    columns, rows = width - LABEL_WIDTH - 1, height - 1
    every = [*points, *marks]
    if not every or columns < 4 or rows < 2:
        return [Text("waiting for the first step", style=theme.faint), *(Text() for _ in range(height - 1))][:height]
    low, high = _range([value for _, value in every])
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    across, down = (2 * columns, 4 * rows) if theme.glyphs.braille else (columns, rows)

    def dot(point: Point) -> tuple[int, int]:
        x = (point[0] - first) / (last - first) * (across - 1) if last > first else 0
        y = (high - point[1]) / (high - low) * (down - 1)
        return round(x), min(down - 1, max(0, round(y)))

    dots = _line([dot(point) for point in points])
    cells = _cells(dots, columns, rows, theme)
    marked = set()
    for mark in marks:
        x, y = dot(mark)
        marked.add((y * rows // down, min(columns - 1, x * columns // across)))
    lines = []
    for index in range(rows):
        labelled = index in (0, rows - 1) or (rows >= 7 and index == rows // 2)
        value = high - (high - low) * index / max(1, rows - 1)
        label = f"{_number(value):>{LABEL_WIDTH - 1}} " if labelled else " " * LABEL_WIDTH
        text, start = Text.assemble((label + theme.glyphs.axis[0 if labelled else 1], theme.faint)), 0
        for column in sorted(x for y, x in marked if y == index):
            text.append(cells[index][start:column], theme.accent).append(theme.glyphs.point, theme.wait)
            start = column + 1
        lines.append(text.append(cells[index][start:], theme.accent))
    left, right = f"{first:.0f}", f"{last:.0f}"
    room = max(1, columns - len(left) - len(right))
    axis = " " * LABEL_WIDTH + theme.glyphs.axis[2]
    lines.append(Text.assemble((axis + left + " " * room + (right if last > first else ""), theme.faint)))
    return lines


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(high)):
        margin = 0.05 * abs(high) or 1.0
        return low - margin, high + margin
    return low, high


def _number(value: float) -> str:
    """At most six characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}"
    digits = max(0, min(3, 4 - len(str(int(abs(value))))))
    return f"{value:.{digits}f}"


def _line(corners: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Dots of a line through the corners, which are in order of x; several in one column become their mean."""
    columns = [(x, [y for _, y in group]) for x, group in groupby(corners, key=itemgetter(0))]
    ends = [(x, round(sum(ys) / len(ys))) for x, ys in columns]
    dots = set(ends[:1])
    for (x0, y0), (x1, y1) in zip(ends, ends[1:], strict=False):
        steps = max(x1 - x0, abs(y1 - y0))
        for index in range(1, steps + 1):
            dots.add((x0 + round((x1 - x0) * index / steps), y0 + round((y1 - y0) * index / steps)))
    return dots


def _cells(dots: set[tuple[int, int]], columns: int, rows: int, theme: Theme) -> list[str]:
    if not theme.glyphs.braille:
        return ["".join("*" if (x, y) in dots else " " for x in range(columns)) for y in range(rows)]
    bits = [[0] * columns for _ in range(rows)]
    for x, y in dots:
        bits[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in bits]
