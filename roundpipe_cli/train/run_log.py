"""Measurements of a run's steps, for the report, the trace and the time that is left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.events import StepFinished
from roundpipe_cli.schedule.timeline import Timeline
from roundpipe_cli.train.result.report import RunFigures

ETA_STEPS = 20
TRACED_STEPS = 3


class RunLog:
    """The steps since the start or the last resume."""

    def __init__(self, *, trace: bool) -> None:
        """
        Args:
            trace: keep the timelines of the last steps.
        """
        self.earlier_s = 0.0
        """Seconds that the run took before it was resumed."""
        self.earlier_losses: Mapping[int, float] = {}
        """Step -> loss of the steps before it was resumed, as far as their rows are known."""
        self.timelines: deque[tuple[float, Timeline]] = deque(maxlen=TRACED_STEPS if trace else 0)
        """The last steps, each with its start, of `time.perf_counter`."""
        self.longest_row = 0
        """Tokens of the longest row until now."""
        self._rows: list[StepFinished] = []
        self._counts: list[int] = []
        """Microbatches of each step."""
        self._pipeline_s: list[float] = []
        self._launch_bound: list[float] = []
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Note the start of training."""
        self._started_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training, those before the last resume included."""
        return self.earlier_s + time.monotonic() - self._started_s

    @property
    def tokens(self) -> float | None:
        """Median of the steps' tokens; None before the first step."""
        return statistics.median(row.tokens for row in self._rows) if self._rows else None

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of most steps; None before the first step."""
        return statistics.mode(self._counts) if self._counts else None

    def computed(self, result: StepResult, pipeline_s: float, microbatches: Sequence[Microbatch]) -> None:
        """A step's forward and backward are done, in `pipeline_s` seconds."""
        self.longest_row = max(self.longest_row, *(one.input_ids.shape[1] for one in microbatches))
        self._counts.append(len(microbatches))
        self._pipeline_s.append(pipeline_s)
        self._launch_bound.append(result.launch_bound_ratio)
        if self.timelines.maxlen:
            computed = result.timeline
            timeline = replace(computed, intervals=(*computed.intervals, *result.links))
            self.timelines.append((result.started_s, timeline))

    def finished(self, row: StepFinished) -> None:
        """Note a finished step."""
        self._rows.append(row)

    def eta_s(self, step_s: float, steps_left: int) -> float:
        """Seconds until the end, where the newest step took `step_s`."""
        recent = [row.step_s for row in self._rows[-ETA_STEPS:]] + [step_s]
        return statistics.median(recent) * steps_left

    def figures(self, num_steps: int, moments_bytes: int) -> RunFigures:
        """The figures of the run until now, after `num_steps` steps."""
        losses = {**self.earlier_losses, **{row.step: row.loss for row in self._rows}}
        return RunFigures(
            self._rows, self._pipeline_s, self._launch_bound, losses, num_steps, self.seconds, moments_bytes
        )
