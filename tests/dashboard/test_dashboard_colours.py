"""The colours of work: contrast on light and dark pages, and between each other for every reader."""

from __future__ import annotations

import itertools
import math

from roundpipe_cli.schedule.pictures import WORK_COLOURS

SEEN_BY = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}
"""Linear red, green and blue as readers see them (Machado, Oliveira and Fernandes 2009, severity 1)."""


def linear(colour: str, reader: str = "all") -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    plain = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return [min(1.0, max(0.0, sum(a * b for a, b in zip(row, plain, strict=True)))) for row in SEEN_BY[reader]]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, reader: str) -> tuple[float, float, float]:
    red, green, blue = linear(colour, reader)
    x, y, z = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_kinds_of_work_are_told_apart_by_every_reader() -> None:
    """On white and on dark pages (3:1), in grey (1.3:1 to each other), and by who sees red and green alike."""
    for colour in WORK_COLOURS.values():
        assert contrast(colour, "#ffffff") >= 3 and contrast(colour, "#14171a") >= 3
    for one, other in itertools.combinations(WORK_COLOURS.values(), 2):
        assert contrast(one, other) >= 1.3
        for reader in SEEN_BY:
            assert math.dist(lab(one, reader), lab(other, reader)) >= 40, (one, other, reader)
