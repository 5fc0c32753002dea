"""report.json: what a finished run was and what it measured."""

from __future__ import annotations

import json
import math
import platform
import resource
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli import __version__
from roundpipe_cli.costs.machine import file_bytes, processor_name
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import redact
from roundpipe_cli.events import REPORT_NAME, DeviceLost, StepFinished
from roundpipe_cli.files import write_atomically
from roundpipe_cli.model.fused import fused_counts
from roundpipe_cli.schedule.pictures import chrome_trace
from roundpipe_cli.schedule.timeline import Interval, Timeline, makespan_s
from roundpipe_cli.train.prepare.ready import Setup

LAST_STEPS = 5
ETA_STEPS = 20
TRACED_STEPS = 3


class RunLog:
    """Figures of a run. Rows, times and bytes are of the steps since the start or the last resume."""

    def __init__(self, *, trace: bool) -> None:
        """`trace`: keep the timelines of the last steps."""
        self.earlier_s = 0.0
        """Seconds that the run took before it was resumed."""
        self.earlier_losses: Mapping[int, float] = {}
        """Step -> loss of the steps before it was resumed, as far as their rows are known."""
        self.timelines: deque[Timeline] = deque(maxlen=TRACED_STEPS if trace else 0)
        """The last steps."""
        self.longest_row = 0
        """Tokens of the longest row until now."""
        self.rows: list[StepFinished] = []
        self.lost: list[tuple[int, DeviceLost]] = []
        """Lost devices, each with the number of rows before."""
        self.pipeline_s: list[float] = []
        """Seconds of forward and backward of each step."""
        self._counts: list[int] = []
        """Microbatches of each step."""
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
        return _median([row.tokens for row in self.rows])

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of most steps; None before the first step."""
        return statistics.mode(self._counts) if self._counts else None

    def computed(self, result: StepResult, microbatches: Sequence[Microbatch]) -> None:
        """A step's forward and backward are done."""
        self.longest_row = max(self.longest_row, *(one.input_ids.shape[1] for one in microbatches))
        self._counts.append(len(microbatches))
        self.pipeline_s.append(result.step_s)
        if self.timelines.maxlen:
            intervals = *result.timeline.intervals, *result.links, *result.waits
            self.timelines.append(replace(result.timeline, intervals=intervals))

    def eta_s(self, step_s: float, steps_left: int) -> float:
        """Seconds until the end, where the newest step took `step_s`."""
        recent = [row.step_s for row in self.rows[-ETA_STEPS:]] + [step_s]
        return statistics.median(recent) * steps_left


def make_report(
    setup: Setup, log: RunLog, predicted: Mapping[str, float], *, num_steps: int, moments_bytes: int
) -> dict[str, Any]:
    """The report of a run.

    Args:
        predicted: the simulator's figures for a full step, from the costs measured in the first steps, and what
            `plan` says of memory; may be empty.
        num_steps: since the start of the run.
        moments_bytes: host memory that the optimizer keeps.
    """
    import transformers

    store, rows = setup.store, log.rows
    max_resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss_of = {**log.earlier_losses, **{row.step: row.loss for row in rows}}
    losses = [loss_of[step] for step in sorted(loss_of) if math.isfinite(loss_of[step])]
    return {
        "tool_version": __version__,
        "model": setup.source.name,
        "model_commit": setup.source.commit,
        "method": setup.recipe.method,
        "dtype": setup.recipe.dtype,
        "kernels": {"setting": setup.recipe.kernels, "fused": fused_counts(setup.fused)},
        "devices": list(setup.devices),
        "machine": {"processor": processor_name() or platform.machine(), "torch": torch.__version__},
        "command": shlex.join(["roundpipe", *map(redact, sys.argv[1:])]),
        "transformers": transformers.__version__,
        "num_steps": num_steps,
        "seconds": log.seconds,
        "data": {
            name: getattr(setup.dataset.report, name)
            for name in ("rows_read", "rows_kept", "rows_truncated", "rows_bad", "trained_tokens")
        },
        "loss": {
            "first": losses[0] if losses and 1 in loss_of else None,
            "last": losses[-1] if losses else None,
            f"mean_of_last_{LAST_STEPS}": statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        },
        "predicted": dict(predicted) or None,
        "measured": {
            "steps": len(rows),
            "first_step": rows[0].step if rows else None,
            "step_s": _median([row.step_s for row in rows]),
            "pipeline_s": _median(log.pipeline_s),
            "tokens_per_s": _median([row.tokens_per_s for row in rows]),
            # A step's own figure, so that it is the one that the dashboard shows for the run.
            "bubble_ratio": statistics.median_low([row.bubble_ratio for row in rows]) if rows else None,
            "launch_bound_ratio": _median([row.launch_bound_ratio for row in rows]),
            "mfu": _median([row.mfu for row in rows if row.mfu is not None]),
            "upload_bytes_per_step": _median([float(row.upload_bytes) for row in rows]),
            "device_peak_bytes": max((row.device_peak_bytes for row in rows), default=0),
            "host_peak_bytes": max_resident_bytes - (file_bytes() if store.is_mapped else 0),
            "host_store_bytes": {**store.num_bytes(), "moments": moments_bytes},
        },
        "lost_devices": [_loss_figures(rows, before, event) for before, event in log.lost],
    }


def _loss_figures(rows: Sequence[StepFinished], before: int, event: DeviceLost) -> dict[str, Any]:
    """A lost device, with the speed before and after; the step that was computed twice counts for neither."""
    parts = {"before": rows[:before], "after": rows[before + 1 :]}
    return {
        **{name: getattr(event, name) for name in ("device", "worker", "at", "cause", "time_s")},
        **{f"tokens_per_s_{name}": _median([row.tokens_per_s for row in part]) for name, part in parts.items()},
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def write_report(output_dir: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, which says that the run is finished."""
    write_atomically(output_dir / REPORT_NAME, (json.dumps(report, indent=2) + "\n").encode(), mode=0o644)


def write_trace(path: Path, steps: Sequence[Timeline]) -> None:
    """Write consecutive steps as one picture for Perfetto (Trace Event format).

    Args:
        steps: what was done in each; the time between them is left out.
    """
    intervals: list[Interval] = []
    offset_s = 0.0
    for timeline in steps:
        for item in timeline.intervals:
            intervals.append(item._replace(start_s=item.start_s + offset_s, end_s=item.end_s + offset_s))
        offset_s += makespan_s(timeline)
    whole = Timeline(steps[0].num_workers, tuple(intervals))
    write_atomically(path, json.dumps(chrome_trace(whole)).encode(), mode=0o644)
