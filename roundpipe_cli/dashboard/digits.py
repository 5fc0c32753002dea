"""One figure in letters of five lines, to be read from afar."""

from __future__ import annotations

import re

from rich.text import Text

from roundpipe_cli.dashboard.theme import Theme

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
    """`GPUs 94% busy` with the figure in five lines where there is room for them, otherwise in one.

    Args:
        text: words, one figure with a per cent sign, words.
    """
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
