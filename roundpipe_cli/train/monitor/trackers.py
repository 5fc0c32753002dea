"""The metrics of a run, sent to trackers through their own packages: `report_to`.

Each tracker has its own thread and bounded queue, so a tracker that is slow, fails or hangs costs the run only
one line that says so. metrics.jsonl has everything whatever happens here. What is sent: the numbers of each step and
evaluation, and the recipe, both without secrets.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from roundpipe_cli.errors import RefusedError, redact, redact_values
from roundpipe_cli.events import EvaluationFinished, Event, Notice, StepFinished, Tell
from roundpipe_cli.files import STATE_FILE_MODE, write_atomically
from roundpipe_cli.recipe.schema import Recipe, dotted_values, plain_data
from roundpipe_cli.regular_files import read_json_of_ours

MAX_WAITING = 10_000
"""Rows that wait for a tracker; further ones are dropped until it catches up."""
FLUSH_S = 10.0
"""Seconds after the run's end at which an unfinished tracker is left behind."""
PROJECT = "roundpipe"
RUN_IDS_NAME = "trackers.json"

Values = Mapping[str, float]


def require_trackers(names: Sequence[str]) -> None:
    """Raise a RefusedError where a package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RefusedError(
                f"reporting to {name} needs the package {name}",
                where="report_to",
                found="not installed",
                hint=f"pip install {name}",
            )


@dataclass(frozen=True)
class RunInfo:
    """Settings of the run for a tracker, before its first step."""

    name: str
    output_dir: Path
    first_step: int
    """Steps that an earlier part of the run has done."""
    config: Mapping[str, Any]
    """The recipe, dotted keys, without secrets."""
    run_id: str | None
    """The tracker's own name of the run that is continued."""


class TrackerRun(NamedTuple):
    """A run in a tracker's package."""

    run_id: str | None
    log: Callable[[int, Values], object]
    """Send numbers of a step."""
    close: Callable[[], object]
    """End the tracker's run: all numbers are sent."""


def start_tensorboard(run: RunInfo) -> TrackerRun:
    """Event files in OUTPUT_DIR/tensorboard, by torch's writer."""
    from torch.utils.tensorboard import SummaryWriter

    purge = {"purge_step": run.first_step + 1} if run.first_step else {}
    writer: Any = SummaryWriter(log_dir=str(run.output_dir / "tensorboard"), **purge)  # type: ignore[no-untyped-call]
    writer.add_text("recipe", f"```\n{json.dumps(run.config, indent=2)}\n```", run.first_step)

    def log(step: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return TrackerRun(None, log, writer.close)


def start_wandb(run: RunInfo) -> TrackerRun:
    """Project: WANDB_PROJECT; what else the package reads from its variables, WANDB_MODE=offline included."""
    os.environ.setdefault("WANDB_SILENT", "true")  # stdout is for the run's own lines
    made: Any = importlib.import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", run.name),
        dir=str(run.output_dir),
        config=dict(run.config),
        id=run.run_id,
        resume="allow" if run.run_id else None,
    )
    return TrackerRun(str(made.id), lambda step, values: made.log(dict(values), step=step), made.finish)


def start_mlflow(run: RunInfo) -> TrackerRun:
    """Experiment: MLFLOW_EXPERIMENT_NAME; server: MLFLOW_TRACKING_URI."""
    mlflow: Any = importlib.import_module("mlflow")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    named = {"run_id": run.run_id} if run.run_id else {"run_name": run.name}
    run_id = str(mlflow.start_run(**named).info.run_id)
    if not run.run_id:
        mlflow.log_params({key: str(value)[:500] for key, value in run.config.items()})
    return TrackerRun(run_id, lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def start_trackio(run: RunInfo) -> TrackerRun:
    """Project: TRACKIO_PROJECT. Local unless TRACKIO_SPACE_ID names a Space."""
    trackio: Any = importlib.import_module("trackio")
    name, project = run.run_id or run.name, os.environ.get("TRACKIO_PROJECT", PROJECT)
    space = os.environ.get("TRACKIO_SPACE_ID")
    trackio.init(project=project, name=name, config=dict(run.config), space_id=space, resume="allow")
    return TrackerRun(name, lambda step, values: trackio.log(dict(values), step=step), trackio.finish)


TRACKERS: dict[str, Callable[[RunInfo], TrackerRun]] = {
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "mlflow": start_mlflow,
    "trackio": start_trackio,
}
"""Tracker, which has the name of the package that has to be installed -> what begins a run there."""


class Trackers:
    """Passes events on and sends the numbers among them to trackers, as a context manager."""

    def __init__(
        self, recipe: Recipe, output_dir: Path, first_step: int, tell: Tell, *, flush_s: float = FLUSH_S
    ) -> None:
        """`first_step`: steps done before; `tell` gets every event first; `flush_s`: wait for a tracker at the end."""
        self._tell, self._flush_s = tell, flush_s
        self._ids_path = output_dir / RUN_IDS_NAME
        self._lock = threading.Lock()
        self._ids = _read_ids(self._ids_path) if first_step and recipe.report_to else {}
        config = dotted_values(redact_values(plain_data(recipe)))
        self._threads = [
            _TrackerThread(
                name, RunInfo(output_dir.name, output_dir, first_step, config, self._ids.get(name)), tell, self._keep_id
            )
            for name in recipe.report_to
        ]

    def __enter__(self) -> Trackers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for thread in self._threads:
            thread.stop(self._flush_s)

    def __call__(self, event: Event) -> None:
        self._tell(event)
        if self._threads and isinstance(event, (StepFinished, EvaluationFinished)):
            for thread in self._threads:
                thread.put(event.step, values_of(event))

    def _keep_id(self, name: str, run_id: str) -> None:
        """So that a resumed run continues there."""
        with self._lock:
            self._ids[name] = run_id
            write_atomically(self._ids_path, json.dumps(self._ids).encode(), STATE_FILE_MODE)


def values_of(event: StepFinished | EvaluationFinished) -> dict[str, float]:
    """The finite numbers of an event under the names of metrics.jsonl, after `train/` or `eval/`."""
    if isinstance(event, StepFinished):
        names = ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "step_s", "bubble_ratio")
        more = ("launch_bound_ratio", "upload_bytes", "device_peak_bytes")
        values = {name: getattr(event, name) for name in (*names, *more)}
        values |= {} if event.mfu is None else {"mfu": event.mfu}
        values |= event.preference or {}
    else:
        values = {name: getattr(event, name) for name in ("loss", "tokens", "seconds")}
        values |= {"perplexity": event.perplexity} if event.preference is None else event.preference
    prefix = "train" if isinstance(event, StepFinished) else "eval"
    return {f"{prefix}/{name}": float(value) for name, value in values.items() if math.isfinite(value)}


def _read_ids(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in read_json_of_ours(path).items()}
    except (OSError, ValueError, AttributeError):
        return {}


class _TrackerThread(threading.Thread):
    """One tracker: everything of its package is called from this thread alone."""

    def __init__(self, tracker: str, info: RunInfo, tell: Tell, keep_id: Callable[[str, str], None]) -> None:
        super().__init__(name=f"tracker-{tracker}", daemon=True)
        self._tracker, self._info, self._tell, self._keep_id = tracker, info, tell, keep_id
        self._rows: queue.Queue[tuple[int, Values] | None] = queue.Queue(MAX_WAITING)
        self._is_dropping = False

    def put(self, step: int, values: Values) -> None:
        """Queue numbers for the tracker; returns at once."""
        if not self.is_alive():
            return
        try:
            self._rows.put_nowait((step, values))
        except queue.Full:
            if not self._is_dropping:
                self._tell(Notice(f"{self._tracker} is too slow: rows are left out there; metrics.jsonl has all"))
            self._is_dropping = True

    def stop(self, flush_s: float) -> None:
        """Wait until the queue is sent, at most `flush_s` seconds."""
        with contextlib.suppress(queue.Full):
            if self.is_alive():
                self._rows.put(None, timeout=flush_s)
                self.join(flush_s)
        if self.is_alive():
            text = f"{self._tracker} is not done after {flush_s:g} s and is left behind; metrics.jsonl has all"
            self._tell(Notice(text))

    def run(self) -> None:
        """Begin a run there and send rows until `stop`."""
        try:
            made = TRACKERS[self._tracker](self._info)
            if made.run_id is not None:
                self._keep_id(self._tracker, made.run_id)
            while (row := self._rows.get()) is not None:
                made.log(*row)
            made.close()
        except BaseException as error:  # whatever a tracker does, the run continues
            text = redact(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
            self._tell(Notice(f"{self._tracker} gets no more metrics, the run continues: {text}"))
