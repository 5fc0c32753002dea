"""Colours and characters. Colours are of middle brightness, so that they show on dark and on light terminals; the text
itself has the terminal's own colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    up: str = "↑"
    down: str = "↓"
    degree: str = "°C"
    frame: str = "╭─╮│╰╯"
    axis: str = "┤│└"
    ellipsis: str = "…"
    braille: bool = True


ASCII = Glyphs(
    full="#",
    left="#",
    right="#",
    wait="~",
    idle=".",
    idle_of_two=".",
    done="=",
    rest="-",
    point="o",
    dot="*",
    between="-",
    up="up ",
    down="down ",
    degree=" C",
    frame="+-+|++",
    axis="||+",
    ellipsis="~",
    braille=False,
)


@dataclass(frozen=True)
class Theme:
    """Colours and characters of a screen."""

    has_colour: bool = True
    glyphs: Glyphs = field(default_factory=Glyphs)
    kinds: Mapping[str, str] = field(default_factory=lambda: dict(WORK_COLOURS))
    wait: str = "#c9507a"
    accent: str = "#3d86e8"
    good: str = "#35a162"
    warn: str = "#e0a02a"
    bad: str = "#d0443e"
    faint: str = "dim"


def theme_for(encoding: str, has_colour: bool) -> Theme:
    """The theme for a terminal that writes `encoding`."""
    is_unicode = encoding.lower().replace("-", "").replace("_", "").startswith("utf")
    return Theme(has_colour=has_colour, glyphs=Glyphs() if is_unicode else ASCII)
