"""Rates of devices, links and host, by the code of `roundpipe doctor --measure`, and its small run."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from roundpipe_cli.costs.measurement import measurement_of
from roundpipe_cli.train import measure
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check


def checks(place: CheckPlace) -> Iterator[Check]:
    for name in measure.PARTS:
        yield check(name, one_part, place, name, limit_s=240.0)


@functools.cache
def known(place: CheckPlace) -> dict[str, object]:
    """Figures of the parts that this process has measured."""
    return {}


def one_part(place: CheckPlace, name: str) -> Figures:
    """Figures of one part; the last one needs all others, and finds out which this process lacks."""
    names, figures = [f"cuda:{index}" for index in place.indices], known(place)
    with place.devices():
        if name != "small_run":
            return measure.add_part(name, names, figures)
        for part in measure.PARTS:
            found = measure.add_part(part, names, figures)
    return {**found, "label": measurement_of(figures).label}
