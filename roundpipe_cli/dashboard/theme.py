"""Colours and characters of a screen, and how its lines are cut, framed and set side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from roundpipe_cli.schedule.pictures import WORK_COLOURS


@dataclass(frozen=True)
class Glyphs:
    """Characters of pictures."""

    full: str = "█"
    left: str = "▌"
    right: str = "▐"
    wait: str = "▒"
    idle: str = "─"
    idle_of_two: str = "▔"
    """In the lower of two lines, so that it is in the middle of both."""
    done: str = "━"
    rest: str = "─"
    point: str = "◆"
    dot: str = "●"
    between: str = "·"
    degree: str = "°C"
    frame: str = "╭─╮│╰╯"
    axis: str = "┤│└"
    ellipsis: str = "…"
    braille: bool = True


ASCII = Glyphs(
    full="#", left="#", right="#", wait="~", idle=".", idle_of_two=".", done="=", rest="-", point="o", dot="*",
    between="-", degree=" C", frame="+-+|++", axis="||+", ellipsis="~", braille=False,
)  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """Colours and characters of a screen."""

    has_colour: bool = True
    glyphs: Glyphs = field(default_factory=Glyphs)
    kinds: Mapping[str, str] = field(default_factory=lambda: dict(WORK_COLOURS))
    wait: str = "#c9507a"
    update: str = "#8a929b"
    accent: str = "#3d86e8"
    good: str = "#35a162"
    warn: str = "#e0a02a"
    bad: str = "#d0443e"
    faint: str = "dim"


def theme_for(console: Console) -> Theme:
    """The theme for what a console can show."""
    is_unicode = console.encoding.lower().replace("-", "").replace("_", "").startswith("utf")
    has_colour = console.color_system is not None and not console.no_color
    return Theme(has_colour=has_colour, glyphs=Glyphs() if is_unicode else ASCII)


# Arranges lines of text: cut to a width, framed, side by side.


def fit(line: Text, width: int, theme: Theme) -> Text:
    """A copy of exactly `width` columns."""
    line = line.copy()
    if line.cell_len > width > 0:
        line.truncate(width - 1, overflow="crop")
        line.append(theme.glyphs.ellipsis, theme.faint)
    line.truncate(width, overflow="crop", pad=True)
    return line


def spread(left: Text, right: Text, width: int, theme: Theme) -> Text:
    """`left` at the left and, if there is room, `right` at the right."""
    gap = width - left.cell_len - right.cell_len
    return Text.assemble(left, " " * gap, right) if gap >= 0 else fit(left, width, theme)


def framed(title: Text, note: str, lines: Sequence[Text], width: int, *, theme: Theme) -> list[Text]:
    """Lines in a frame with a title at its left and a note at its right."""
    top_left, bar, top_right, side, bottom_left, bottom_right = tuple(theme.glyphs.frame)
    faint, inner = theme.faint, width - 4
    title = fit(title, min(title.cell_len, inner - 2), theme)
    if title.cell_len + len(note) + 4 > inner:
        note = ""
    gap = width - 5 - title.cell_len - (len(note) + 2 if note else 0)
    top = Text.assemble((f"{top_left}{bar} ", faint), title, (f" {bar * (gap - 1)}", faint))
    if note:
        top.append(f" {note} ", faint)
    top.append(f"{bar}{top_right}", faint)
    rows = [Text.assemble((f"{side} ", faint), fit(line, inner, theme), (f" {side}", faint)) for line in lines]
    return [top, *rows, Text(f"{bottom_left}{bar * (width - 2)}{bottom_right}", style=faint)]


def beside(blocks: Sequence[Sequence[Text]], widths: Sequence[int], theme: Theme) -> list[Text]:
    """Blocks of lines next to each other, the shorter ones filled up."""
    rows = zip_longest(*blocks, fillvalue=Text())
    return [Text.assemble(*(fit(line, width, theme) for line, width in zip(row, widths, strict=True))) for row in rows]
