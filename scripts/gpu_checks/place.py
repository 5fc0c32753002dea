"""Where checks run, what a check is, and what it needs."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

OPTIONAL = ("bitsandbytes", "datasets", "gguf", "omegaconf")
"""Packages that a bare machine may lack; what needs one is skipped, and listed."""
CHECK_LIMIT_S, WATCHDOG_S = 120.0, 60.0
"""A check that takes longer is stopped, and the next one is tried; stacks are shown, and the engine fails, before."""
Figures = Mapping[str, Any]
"""Results of a check, as they go into the JSON document."""


class SkippedCheckError(Exception):
    """A check that this machine cannot make, with the reason."""


@dataclass(frozen=True)
class CheckPlace:
    """Devices that a part checks."""

    is_simulated: bool
    indices: tuple[int, ...]
    """Of the GPUs; simulated, there are two."""
    scale: str
    """`tiny` or `full`: sizes of what is measured."""
    is_quick: bool = False
    """A few checks of each part, on all cards at once."""
    trace: str = ""
    """File for a trace of a whole step; empty: none."""

    @property
    def first(self) -> int:
        return self.indices[0]

    @property
    def pairs(self) -> list[tuple[int, ...]]:
        """Devices of the workers, in every way that is tried: one GPU, listed twice, and two of them; quick, all."""
        if self.is_quick:
            return [self.indices if len(self.indices) > 1 else (self.first, self.first)]
        ways = [(self.first,), (self.first, self.first)]
        return [*ways, self.indices[:2]] if len(self.indices) > 1 else ways

    @contextmanager
    def devices(self, seed: int = 0, *, lazy: bool = False) -> Iterator[Any]:
        """Devices for the length of the block: nothing to do for real ones; yields the simulation, or None."""
        if not self.is_simulated:
            yield None
            return
        from tests.support.simulated_cases import simulated

        with simulated(seed, lazy=lazy) as simulation:
            yield simulation

    @contextmanager
    def processor(self) -> Iterator[None]:
        """Around what the processor computes to compare with: simulated cards are to give the same bits."""
        if not self.is_simulated:
            yield
            return
        from tests.support.simulated_cases import kernels_as_on

        with kernels_as_on():
            yield


@dataclass(frozen=True)
class Check:
    """One question and how it is answered."""

    name: str
    run: Callable[[], Figures]
    """Raises `SkippedCheckError` where it cannot be answered here, and anything else where the answer is bad."""
    limit_s: float = CHECK_LIMIT_S


def check(name: str, function: Callable[..., Figures], *args: Any, limit_s: float = CHECK_LIMIT_S) -> Check:
    """A check that calls `function` with `args`."""
    return Check(name, functools.partial(function, *args), limit_s)


def block_imports(names: tuple[str, ...]) -> None:
    """Make packages look as if they were not installed, for this process."""
    for name in names:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]  # import and find_spec then find nothing


def require(name: str) -> None:
    """Raises: SkippedCheckError: the package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise SkippedCheckError(f"{name} is not installed")


def skip_unless_real(place: CheckPlace, what: str) -> None:
    """Raises: SkippedCheckError: the devices are simulated."""
    if place.is_simulated:
        raise SkippedCheckError(f"{what} needs a real card")
