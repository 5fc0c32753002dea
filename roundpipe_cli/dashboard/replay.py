"""A run's events from the files in its output directory, as they grow: metrics.jsonl (steps) and events.jsonl (all
else). Lines that are torn, by a kill or because they are just being written, are read when they are whole."""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from roundpipe_cli import events
from roundpipe_cli.choices import EXAMPLES
from roundpipe_cli.dashboard.state import DashboardState, fold_all
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import EVENTS_NAME, LOCK_NAME, METRICS_NAME, REPORT_NAME
from roundpipe_cli.regular_files import MAX_LINE_BYTES, json_objects, lock_holder, open_regular

ETA_STEPS = 20
MAX_READ_BYTES = 2 * MAX_LINE_BYTES
"""Read at once: a file without an end, or of a terabyte of nothing, is no reason to take all memory."""
REWARD_KEYS = tuple(dict.fromkeys(key for kind in EXAMPLES.values() for key in kind.metrics))
"""Keys of a row of metrics.jsonl that only some objectives have."""

TimedEvent = tuple[float, events.Event]
MetricsRow = dict[str, Any]


class Life(Enum):
    """The state of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


class GrowingFile:
    """The lines of a file that another process appends to or replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def changed(self) -> bool:
        """Whether the file no longer begins with the lines that were read."""
        try:
            status = self._path.stat()
        except OSError:
            return self._inode is not None
        return self._inode is not None and (status.st_ino != self._inode or status.st_size < self._offset)

    def new_rows(self) -> list[MetricsRow]:
        """Whole lines since the last call; what is no JSON object is left out."""
        rows: list[MetricsRow] = []
        try:
            with open_regular(self._path) as stream:
                self._inode = os.fstat(stream.fileno()).st_ino
                while lines := self._next_lines(stream):
                    rows += json_objects(lines)
        except OSError:
            return []
        return rows

    def _next_lines(self, stream: BinaryIO) -> bytes:
        """Some more whole lines; none where the rest has no line break: an unfinished line, or no file of rows."""
        stream.seek(self._offset)
        whole, newline, _ = stream.read(MAX_READ_BYTES).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole + newline


def instead_of(missing: str, folder: Path) -> str:
    """In words, where a run was looked for: `missing` where the folder is there."""
    if folder.is_dir():
        return missing
    return "a file" if folder.exists() else "no such folder"


def run_hint(folder: Path) -> str:
    """A hint: the newest run below `folder`, or how to make one."""
    found = [
        path for pattern in (METRICS_NAME, f"*/{METRICS_NAME}", f"*/*/{METRICS_NAME}") for path in folder.glob(pattern)
    ]
    runs = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime)
    if not runs:
        return "no run is here or in outputs/; `roundpipe finetune RECIPE` starts one"
    return f"the newest run here is {runs[-1].parent.relative_to(folder)}"


class RunFiles:
    """The events of one run, oldest first, each told once."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the run's output directory.

        Raises:
            RefusedError: there is no run in it.
        """
        self.folder = folder
        names = (METRICS_NAME, EVENTS_NAME, REPORT_NAME, LOCK_NAME)
        if not any((folder / name).is_file() for name in names):
            raise RefusedError(
                "there is no run in this folder",
                where=str(folder),
                found=instead_of(f"neither {METRICS_NAME} nor {EVENTS_NAME}", folder),
                expected="the output_dir of a run",
                hint=run_hint(Path.cwd()),
            )
        self._restart()

    def _restart(self) -> None:
        self._metrics = GrowingFile(self.folder / METRICS_NAME)
        self._events = GrowingFile(self.folder / EVENTS_NAME)
        self._rows: deque[MetricsRow] = deque()
        self._timelines: dict[int, events.StepTimeline] = {}
        """Events that were read and not returned yet."""
        self._num_steps = 0
        self._time_s = 0.0
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)

    def poll(self) -> tuple[bool, list[TimedEvent]]:
        """(whether everything begins anew, new events). It does where a run was resumed or its file was thinned."""
        anew = self._metrics.changed() or self._events.changed()
        if anew:
            self._restart()
        lines = self._events.new_rows()
        self._rows.extend(self._metrics.new_rows())
        told: list[TimedEvent] = []
        decoded = [(line, event) for line in lines if (event := events.decode(line)) is not None]
        self._timelines = {event.step: event for _, event in decoded if isinstance(event, events.StepTimeline)}
        for line, event in decoded:
            if isinstance(event, events.StepTimeline):
                told += self._steps_up_to(event.step - 1)
                if self._timelines.pop(event.step, None) is None:
                    continue  # told already
            else:
                told += self._steps_up_to(_number(line.get("step", line.get("after"))))
            self._time_s = _number(line.get("t")) or self._time_s
            if isinstance(event, events.RunStarted):
                self._num_steps = event.num_steps
            told.append((self._time_s, event))
        return anew, told + self._steps_up_to(math.inf)

    def _steps_up_to(self, last: float) -> list[TimedEvent]:
        """The steps that have been read and not told yet, each after its timeline, which may be written later."""
        told: list[TimedEvent] = []
        while self._rows and _number(self._rows[0].get("step")) <= last:
            step = self._step(self._rows.popleft())
            if step is None:
                continue
            timeline = self._timelines.pop(step.step, None)
            if timeline is not None:
                told.append((self._time_s, timeline))
            told.append((self._time_s, step))
        return told

    def _step(self, row: MetricsRow) -> events.StepFinished | None:
        total = max(self._num_steps, int(_number(row.get("step"))))
        event = events.decode(
            {
                **row,
                **{"event": "StepFinished", "num_steps": total, "eta_s": 0.0},
                "grad_norm": math.inf if row.get("grad_norm") is None else row["grad_norm"],
                "preference": {name: row[name] for name in REWARD_KEYS if name in row} or None,
            }
        )
        if not isinstance(event, events.StepFinished):
            return None
        self._step_s.append(event.step_s)
        return replace(event, eta_s=statistics.median(self._step_s) * (total - event.step))

    def before(self, first_step: int) -> DashboardState:
        """The curves of the first `first_step` steps, which a resumed run begins with."""
        kinds = (events.StepFinished, events.EvaluationFinished)
        told = [timed for timed in self.poll()[1] if isinstance(timed[1], kinds) and timed[1].step <= first_step]
        known = fold_all(told)
        return DashboardState(losses=known.losses, speeds=known.speeds, evaluations=known.evaluations)

    def life(self) -> Life:
        """Whether the run goes on, as far as this machine can tell."""
        if (self.folder / REPORT_NAME).is_file():
            return Life.FINISHED
        holder = lock_holder(self.folder / LOCK_NAME)
        return Life.RUNNING if holder is not None and holder.may_live else Life.STOPPED


def _number(value: object) -> float:
    """The value; 0 if it is no finite number."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < events.MAX_NUMBER else 0.0
