"""report.json: what a finished run was and what it measured."""

from __future__ import annotations

import math
import platform
import resource
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_cli import __version__
from roundpipe_cli.costs.machine import processor_name
from roundpipe_cli.errors import redact
from roundpipe_cli.events import StepFinished
from roundpipe_cli.model.fused import fused_counts
from roundpipe_cli.train.setup import Setup

LAST_STEPS = 5


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run; times and bytes are of the steps since the last resume."""

    rows: Sequence[StepFinished]
    pipeline_s: Sequence[float]
    """Seconds of forward and backward of each step."""
    launch_bound: Sequence[float]
    """Share of each step's busy time in which GPUs may have waited for launches."""
    losses: Mapping[int, float]
    """Step -> loss since the start of the run; steps whose rows were lost are missing."""
    num_steps: int
    """Steps since the start of the run."""
    seconds: float
    """Seconds of training since the start of the run."""
    moments_bytes: int
    """Host memory that the optimizer keeps."""


def make_report(setup: Setup, figures: RunFigures, predicted: Mapping[str, float]) -> dict[str, Any]:
    """The report of a run.

    Args:
        predicted: the simulator's figures for a full step, from the costs measured in the first steps, and what
            `plan` says of memory; may be empty.
    """
    import transformers

    store, rows = setup.store, figures.rows
    losses = [figures.losses[step] for step in sorted(figures.losses) if math.isfinite(figures.losses[step])]
    return {
        "tool_version": __version__,
        "model": setup.source.name,
        "model_commit": setup.source.commit,
        "method": setup.recipe.method,
        "dtype": setup.recipe.dtype,
        "kernels": {"setting": setup.recipe.kernels, "fused": fused_counts(setup.fused)},
        "devices": list(setup.devices),
        "machine": {"processor": processor_name() or platform.machine(), "torch": torch.__version__},
        "command": redact(shlex.join(["roundpipe", *sys.argv[1:]])),
        "transformers": transformers.__version__,
        "num_steps": figures.num_steps,
        "seconds": figures.seconds,
        "data": {
            "rows_read": setup.dataset.report.rows_read,
            "rows_kept": setup.dataset.report.rows_kept,
            "rows_truncated": setup.dataset.report.rows_truncated,
            "rows_bad": setup.dataset.report.rows_bad,
            "trained_tokens": setup.dataset.report.trained_tokens,
        },
        "loss": {
            "first": losses[0] if losses and 1 in figures.losses else None,
            "last": losses[-1] if losses else None,
            f"mean_of_last_{LAST_STEPS}": statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        },
        "predicted": dict(predicted) or None,
        "measured": {
            "steps": len(rows),
            "first_step": rows[0].step if rows else None,
            "step_s": _median([row.step_s for row in rows]),
            "pipeline_s": _median(figures.pipeline_s),
            "tokens_per_s": _median([row.tokens_per_s for row in rows]),
            # A step's own figure, so that it is the one that the dashboard shows for the run.
            "bubble_ratio": statistics.median_low([row.bubble_ratio for row in rows]) if rows else None,
            "launch_bound_ratio": _median(figures.launch_bound),
            "upload_bytes_per_step": _median([float(row.upload_bytes) for row in rows]),
            "device_peak_bytes": max((row.device_peak_bytes for row in rows), default=0),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "host_store_bytes": {**store.num_bytes(), "moments": figures.moments_bytes},
        },
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
