"""Device memory: the driver's context, what torch allocated and reserved, the driver's peak; against the plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from roundpipe_cli.costs.analytic import Case
from roundpipe_cli.costs.memory import device_need
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.engine.backends import cuda
from scripts.gpu_checks.models import SPEED_MODEL
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check
from scripts.gpu_checks.ways import MICROBATCHES, TOKENS, cut_of, engine_steps, make_trial

SAMPLE_S = 0.01


def checks(place: CheckPlace) -> Iterator[Check]:
    yield check("context", context, place)
    for method in ("lora", "full"):
        yield check(f"step, {method}", step, place, method, limit_s=240.0)


def context(place: CheckPlace) -> Figures:
    """Bytes that the driver holds before and after the first operation, beyond what torch has reserved."""
    with place.devices():
        before = cuda.memory_use(place.first)[0]
        torch.ones(1, device=torch.device("cuda", place.first)).add_(1)
        after = cuda.memory_use(place.first)[0]
        return {"used_before_bytes": before, "context_bytes": after - before - torch.cuda.memory_reserved(place.first)}


class DriverPeak:
    """Largest use of a GPU's memory that the driver reported, looked at every `SAMPLE_S`."""

    def __init__(self, index: int) -> None:
        self._index, self._stop = index, threading.Event()
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.num_bytes = max(self.num_bytes, cuda.memory_use(self._index)[0])

    def __enter__(self) -> DriverPeak:
        self.num_bytes = cuda.memory_use(self._index)[0]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def step(place: CheckPlace, method: str) -> Figures:
    """A streamed step's peaks against `plan`'s figure, part by part."""
    trial = make_trial(place, method)
    cut, index = cut_of(trial, 0), place.first
    architecture = parse_config(trial.model.figures, name=SPEED_MODEL, source="gpu_check")
    settings = TrainingSettings(TOKENS[place.scale], num_microbatches=MICROBATCHES, method=method, lora_r=16)  # type: ignore[arg-type]
    case = Case(architecture, settings, trial.hardware, trial.costs)
    need = device_need(case, cut.forward_stages, cut.backward_stages)
    with place.devices():
        with DriverPeak(index) as driver:
            results = engine_steps(place, trial, "streamed")
        reserved = torch.cuda.max_memory_reserved(index)
    allocated = max(max(result.device_peak_bytes) for result in results)
    parts = dict(need.parts)
    return {
        "planned_bytes": need.total_bytes,
        "planned_parts": parts,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "driver_peak_bytes": driver.num_bytes,
        "allocated_to_planned": allocated / need.total_bytes,
    }
