"""Measurements of machines, as `roundpipe doctor --measure` writes them: their file, checked, and the rates in it.

A file names cards, driver and torch, and neither the machine nor its owner. The machine's own is in the cache; those
that people sent are in `costs/measured`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from roundpipe_cli.cache import cache_folder, sealed, unsealed
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import write_atomically
from roundpipe_cli.regular_files import read_json_of_ours

KIND, FORMAT = "measurement by roundpipe doctor --measure", 1
"""The number is raised when figures get another meaning."""
MAX_BYTES = 1024**2
MEASURED_ON = "measured on "
"""How a note on a measurement begins."""
SENT = Path(__file__).parent / "measured"
MEASURE = "roundpipe doctor --measure"
RateCurve = tuple[tuple[float, float], ...]
"""(size, rate) with rising sizes."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """One worker's rates while all workers are busy; floating-point operations and bytes per second."""

    products: tuple[tuple[str, RateCurve], ...]
    """By type; `float16 in 16 bit` adds up in float16. Size: operations of a product."""
    attention: tuple[tuple[str, RateCurve], ...]
    """Forward and backward together. Size: operations."""
    memory: RateCurve
    """Rate of operators that read and write each element once. Size: their bytes."""
    unpacking: tuple[tuple[str, float], ...]
    """Weights per second, by packed form."""
    link_bytes_per_s: float
    """In each direction while both are used."""
    time_factor: float
    """Measured time of a small run, of its time by the other rates."""
    launches_per_s: tuple[tuple[int, float], ...]
    """Launches of all workers together, by their number."""

    def part(self, share: float) -> MeasuredRates:
        """A share of the device, as one of several workers has it."""
        return replace(self, time_factor=self.time_factor / share, link_bytes_per_s=self.link_bytes_per_s * share)


@dataclass(frozen=True, slots=True)
class MeasuredWorker:
    """A worker's device and its rates."""

    device: str
    """As the driver names the card; `cpu`."""
    memory_bytes: int
    rates: MeasuredRates


@dataclass(frozen=True, slots=True)
class Measurement:
    """A machine as it was measured."""

    workers: tuple[MeasuredWorker, ...]
    processor: str
    cores: int
    host_memory_bytes: int
    update_bytes_per_s: float
    """Traffic of the host's memory during AdamW's update."""
    date: str
    driver: str
    torch: str

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


def read_measurement(path: Path) -> Measurement:
    """The measurement in a file.

    Raises:
        RefusedError: it is not there, damaged, no measurement, or of another version.
    """

    def refused(what: str, found: object, hint: str) -> RefusedError:
        return RefusedError(what, where=str(path), found=str(found), expected=f"a file of {MEASURE}", hint=hint)

    try:
        raw, content = read_json_of_ours(path, MAX_BYTES), None
        if isinstance(raw, dict) and "sha256" in raw:
            content = unsealed(path, MAX_BYTES)
    except FileNotFoundError:
        raise refused("there is no such measurement", "nothing", f"{MEASURE} FILE writes one") from None
    except (OSError, ValueError) as error:
        raise refused("the file of a measurement is damaged", error, f"copy it again, or {MEASURE}") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise refused("this is no measurement", "another document", f"{MEASURE} FILE writes one")
    if content.get("format") != FORMAT:
        found = f"format {content.get('format')}, this roundpipe reads {FORMAT}"
        raise refused("the measurement is of another version", found, f"measure again: {MEASURE}")
    try:
        return _measurement(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise refused("a measurement lacks figures", found, f"measure again: {MEASURE}") from None


def _measurement(content: Mapping[str, Any]) -> Measurement:
    host, step = content["host"], content["step"]
    launches = tuple((int(count), _rate(rate)) for count, rate in host["launches_per_s"].items())
    factor = _rate(step["measured_s"]) / _rate(step["predicted_s"])
    workers = []
    for one in content["workers"]:
        rates = MeasuredRates(
            products=tuple((name, _curve(rows)) for name, rows in one["products"].items()),
            attention=tuple((name, _curve(rows)) for name, rows in one["attention"].items()),
            memory=_curve(one["memory"]),
            unpacking=tuple((name, _rate(rate)) for name, rate in one["unpacking"].items()),
            link_bytes_per_s=_rate(one["both_bytes_per_s"]),
            time_factor=factor,
            launches_per_s=launches,
        )
        workers.append(MeasuredWorker(str(one["device"]), int(_rate(one["memory_bytes"])), rates))
    if not workers or not launches or not workers[0].rates.products:
        raise ValueError("no rates")
    return Measurement(
        tuple(workers),
        processor=str(content["processor"]),
        cores=int(content["cores"]),
        host_memory_bytes=int(_rate(content["host_memory_bytes"])),
        update_bytes_per_s=_rate(host["update_bytes_per_s"]),
        **{key: str(content[key]) for key in ("date", "driver", "torch")},
    )


def _rate(value: Any) -> float:
    if not 0 < float(value) < 1e30:
        raise ValueError(f"{value} is no rate")
    return float(value)


def _curve(rows: Any) -> RateCurve:
    curve = tuple((_rate(size), _rate(rate)) for size, rate in rows)
    if not curve or any(one[0] >= other[0] for one, other in pairwise(curve)):
        raise ValueError("sizes do not rise")
    return curve


def write_measurement(path: Path, content: Mapping[str, Any]) -> None:
    """Write a measurement, whole or not at all.

    Raises:
        ResourceError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sealed({"kind": KIND, "format": FORMAT, **content}))


def own_path() -> Path:
    """The place of this machine's own measurement; there may be none."""
    return cache_folder("measured") / "machine.json"


@lru_cache(maxsize=1)
def sent_measurements() -> tuple[Measurement, ...]:
    """Measurements that people sent, the newest first."""
    return tuple(sorted(map(read_measurement, SENT.glob("*.json")), key=lambda one: one.date, reverse=True))
