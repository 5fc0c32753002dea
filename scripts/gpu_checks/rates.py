"""Rates of devices, links and host, by the code of `roundpipe doctor --measure`, and its small run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from roundpipe_cli.costs.measurement import read_measurement, write_measurement
from roundpipe_cli.train import measure
from roundpipe_cli.train.prepare.devices import make_backends
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check


def checks(place: CheckPlace) -> Iterator[Check]:
    for name in measure.PARTS:
        yield check(name, one_part, place, name)
    yield check("a small run", whole, place, limit_s=240.0)


def names_of(place: CheckPlace) -> list[str]:
    return [f"cuda:{index}" for index in place.indices]


def kind_of(place: CheckPlace) -> str:
    """Simulated cards compute as fast as a processor."""
    return "cuda" if place.scale == "full" else "cpu"


def one_part(place: CheckPlace, name: str) -> Figures:
    """Figures of one part."""
    with place.devices():
        return measure.PARTS[name](make_backends(names_of(place), 1), kind_of(place))


def whole(place: CheckPlace) -> Figures:
    """All parts again, for a file with which the small run is planned."""
    with tempfile.TemporaryDirectory() as folder, place.devices():
        path, content = Path(folder) / "measured.json", measure.identity(names_of(place))
        for part in measure.PARTS.values():
            measure.merge(content, part(make_backends(names_of(place), 1), kind_of(place)))
        write_measurement(path, content)
        measure.merge(content, measure.step(names_of(place), kind_of(place), str(path)))
        write_measurement(path, content)
        return {**content["step"], "label": read_measurement(path).label}
