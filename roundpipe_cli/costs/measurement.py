"""Measurements of machines, as `roundpipe doctor --measure` writes them: the rates, and the file of them, checked.

A file names cards, driver and torch, and neither the machine nor its owner. The machine's own is in the cache; those
that people sent are in `costs/measured`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from roundpipe_cli.cache import cache_folder, sealed, unsealed
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import from_json

KIND, FORMAT = "measurement by roundpipe doctor --measure", 2
"""The number is raised when figures get another meaning."""
MAX_BYTES, MAX_NAME = 1024**2, 200
MEASURED_ON = "measured on "
"""How a note on a measurement begins."""
SENT = Path(__file__).parent / "measured"
MEASURE = "roundpipe doctor --measure"
RateCurve = tuple[tuple[float, float], ...]
"""(size, rate) with rising sizes."""
CURVES = ("products", "narrow_products", "attention", "memory", "unpacking")
"""Figures of a worker that are curves by type or packed form."""
TYPES = frozenset({"float32", "float16"})
"""Types that every device has; bfloat16 where it can."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """One worker's device and its rates while all workers are busy; floating-point operations and bytes per second."""

    device: str
    """As the driver names the card; `cpu`."""
    memory_bytes: int
    products: Mapping[str, RateCurve]
    """By type. Size: operations of a product."""
    narrow_products: Mapping[str, RateCurve]
    """Products that add up in float16; none on a processor."""
    attention: Mapping[str, RateCurve]
    """Forward and backward together, by type. Size: operations of the forward."""
    memory: Mapping[str, RateCurve]
    """Operators of float32 that read and write each element once. Size: their bytes."""
    unpacking: Mapping[str, RateCurve]
    """Weights per second, by packed form."""
    link_bytes_per_s: float
    """In each direction while both are used."""
    launches_per_s: RateCurve
    """Launches of all workers together. Size: their number."""
    slowdown: float = 1.0
    """Measured time of a small run, of its time by the other rates."""

    def part(self, share: float) -> MeasuredRates:
        """A share of the device, as one of several workers has it."""
        return replace(self, slowdown=self.slowdown / share, link_bytes_per_s=self.link_bytes_per_s * share)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A machine as it was measured."""

    workers: tuple[MeasuredRates, ...]
    processor: str
    cores: int
    host_memory_bytes: int
    update_bytes_per_s: float
    """Traffic of the host's memory during AdamW's update."""
    date: str
    driver: str
    torch: str

    def __post_init__(self) -> None:
        """Raises: ValueError: figures that no machine has."""
        names, figures = [self.processor, self.date, self.driver, self.torch], [self.cores, self.update_bytes_per_s]
        for one in self.workers:
            by_type = [getattr(one, name) for name in CURVES]
            curves = [one.launches_per_s, *(curve for group in by_type for curve in group.values())]
            if not all(curves) or any(low[0] >= high[0] for curve in curves for low, high in pairwise(curve)):
                raise ValueError("sizes do not rise")
            if not TYPES <= one.products.keys() <= one.attention.keys() or "float32" not in one.memory:
                raise ValueError("a type is missing")
            names += [one.device, *(name for group in by_type for name in group)]
            figures += [one.memory_bytes, one.link_bytes_per_s, 100 * one.slowdown, 100 / (one.slowdown or 1e9)]
            figures += [number for curve in curves for point in curve for number in point]
        if not self.workers or min(figures) < 1 or max(map(len, names)) > MAX_NAME:
            raise ValueError("a figure or a name that no machine has")

    def rates_for(self, is_such: Callable[[str], bool]) -> MeasuredRates | None:
        """The rates of each device whose name is such: the mean time at each size, the slowest link, the least memory;
        None where none was measured.

        Which of several a worker has is not known, and most of what they differ by is chance.
        """
        alike = [worker for worker in self.workers if is_such(worker.device)]
        if not alike:
            return None
        curves: dict[str, Any] = {name: _mean_curves([getattr(one, name) for one in alike]) for name in CURVES}
        link_bytes_per_s = min(one.link_bytes_per_s for one in alike)
        memory_bytes = min(one.memory_bytes for one in alike)
        return replace(alike[0], link_bytes_per_s=link_bytes_per_s, memory_bytes=memory_bytes, **curves)

    @property
    def label(self) -> str:
        """`2 x RTX 3090, 2026-11-28`."""
        names = Counter(worker.device.replace("NVIDIA ", "").replace("GeForce ", "") for worker in self.workers)
        cpus = f"CPU workers ({self.processor}, {self.cores} cores)"
        listed = [f"{count} {cpus}" if name == "cpu" else f"{count} x {name}" for name, count in names.items()]
        return f"{' + '.join(listed)}, {self.date}"

    @property
    def note(self) -> str:
        """A line for the user."""
        driver = f"driver {self.driver}, " if self.driver else ""
        return f"{MEASURED_ON}{self.label} ({driver}torch {self.torch}): rates of devices, links and host"


def at(curve: RateCurve, size: float) -> float:
    """The rate at a size: between two measured ones by the size's logarithm, beyond them that of the nearest."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in pairwise(curve):
        if size <= high:
            return slow + (fast - slow) * math.log(size / low) / math.log(high / low)
    return curve[-1][1]


def _mean_curves(groups: Sequence[Mapping[str, RateCurve]]) -> dict[str, RateCurve]:
    """The curves of devices as one's: at each size of the first that has it, the rate by the mean of their times."""
    means: dict[str, RateCurve] = {}
    for name, first in {name: curve for group in reversed(groups) for name, curve in group.items()}.items():
        curves = [group[name] for group in groups if name in group]
        means[name] = tuple((size, harmonic_mean([at(curve, size) for curve in curves])) for size, _ in first)
    return means


def measurement_of(content: Mapping[str, object]) -> Measurement:
    """The measurement with these figures. Raises: ArithmeticError, KeyError, TypeError, ValueError: it has others."""
    found: Measurement = from_json(content, Measurement)
    return found


def measurement_text(content: Mapping[str, object]) -> str:
    """The file of a measurement's figures."""
    return sealed({"kind": KIND, "format": FORMAT, **content}).decode()


def read_measurement(path: Path) -> Measurement:
    """The measurement in a file.

    Raises:
        RefusedError: it is not there, damaged, no measurement, or of another version.
    """
    what, found = "this is no measurement, or it is damaged", "another document"
    try:
        content = unsealed(path, MAX_BYTES)
        if isinstance(content, dict) and content.get("kind") == KIND:
            if content.get("format") == FORMAT:
                return measurement_of(content)
            what = "the measurement is of another version"
            found = f"format {content.get('format')}, this roundpipe reads {FORMAT}"
    except FileNotFoundError:
        what, found = "there is no such measurement", "nothing"
    except (ArithmeticError, KeyError, OSError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    raise RefusedError(what, where=str(path), found=found[:MAX_NAME], hint=f"{MEASURE} FILE writes one")


def own_path() -> Path:
    """The place of this machine's own measurement; there may be none."""
    return cache_folder("measured") / "machine.json"


@lru_cache(maxsize=1)
def sent_measurements() -> tuple[Measurement, ...]:
    """Measurements that people sent, the newest first."""
    return tuple(sorted(map(read_measurement, SENT.glob("*.json")), key=lambda one: one.date, reverse=True))
