"""Plain lines of a run or a download: one for each logged step on stdout, everything else on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable

from roundpipe_cli import events
from roundpipe_cli.cli.output import has_codes, say, say_data, terminal_width
from roundpipe_cli.dashboard.state import DashboardState, fetching_line, fold
from roundpipe_cli.dashboard.views import details
from roundpipe_cli.dashboard.waiting import advice
from roundpipe_cli.events import run_clock
from roundpipe_cli.units import counted, format_clock, format_loss, format_seconds

EVERY_S = 10.0
"""Least seconds between two lines of a download where lines cannot be painted over."""
ETA_COLUMNS = 18
"""Columns that a step's line keeps for its last figure, so that all lines of a run leave out the same ones."""
SAMPLE_CHARACTERS = 200
"""Characters shown of a generated answer and of the end of its prompt; eval.jsonl has all of it."""
DETAILS_S = 60.0
"""Least seconds between two looks at the workers; the last step always has one."""


class LinePrinter:
    """Plain lines: one per logged step on stdout, everything else on stderr.

    Once a minute, and at the last step, they say what workers wait for and what helps, where that is worth a change.
    """

    def __init__(
        self,
        logging_steps: int,
        clock: Callable[[], float] | None = None,
        *,
        as_json: bool = False,
        is_verbose: bool = False,
        is_kept: bool = True,
    ) -> None:
        """
        Args:
            logging_steps: a line for every so many steps, and for the first and the last.
            clock: Unix time; None: now.
            as_json: on stdout a line of JSON for each of these steps, and nothing else.
            is_verbose: say all that a dashboard shows of the workers instead, after the first step too.
            is_kept: see `say_data`.
        """
        self._logging_steps, self._clock = logging_steps, clock or run_clock()
        self._as_json, self._is_verbose, self._is_kept = as_json, is_verbose, is_kept
        self._state = DashboardState()
        self._details_s, self._details_step = -math.inf, 0
        self._advised: set[str] = set()
        """Causes of waits that were named; each is once."""
        self._progress_s = self._clock()
        """When the last line of a download was said."""
        self._has_progress = False
        """Whether the line above the cursor is one."""

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, events.WorkSeen):
            self._state = fold(self._state, event, self._clock())
        if isinstance(event, events.Fetching):
            self._show_progress(event)
            return
        self._has_progress = False
        if isinstance(event, events.StepFinished):
            if event.step % self._logging_steps == 0 or event.step in (1, event.num_steps):
                line = step_json(event) if self._as_json else step_line(event, self._clock(), terminal_width())
                say_data(line, is_kept=self._is_kept)
                self._say_details(event)
        elif isinstance(event, events.EvaluationFinished):
            if self._as_json:
                say(evaluation_line(event))
            else:
                say_data(evaluation_line(event), is_kept=self._is_kept)
            for prompt, answer in event.samples:
                say(f"sample: {prompt[-SAMPLE_CHARACTERS:]!r} -> {answer[:SAMPLE_CHARACTERS]!r}")
        elif isinstance(event, events.Notice):
            say(event.text if event.text.startswith("warning: ") else f"note: {event.text}")
        elif isinstance(event, events.DeviceLost):
            say(f"warning: {time.strftime('%H:%M:%S', time.localtime(event.time_s))} {event.text}")
        elif isinstance(event, events.Phase):
            say(f"{event.text} ...")
        elif isinstance(event, events.RunStarted):
            on = ", ".join(event.devices)
            say(f"training {event.title}, {event.settings}: {counted(event.num_steps, 'step')} on {on}")
        elif isinstance(event, events.Paused):
            say(f"paused after step {event.step}" if event.paused else "continuing")
        elif isinstance(event, events.CheckpointSaved):
            waited = f", training waited {format_seconds(event.pause_s)}"
            say(f"checkpoint {event.folder} ({format_seconds(event.seconds)}{waited})")
        elif isinstance(event, events.RunStopped):
            self._say_last_details()
        elif isinstance(event, events.RunFinished):
            took = f"{counted(event.num_steps, 'step')} in {format_seconds(event.seconds)}"
            say(f"done: {took}; the result is in {event.output_dir}")

    def _show_progress(self, event: events.Fetching) -> None:
        text = fetching_line(event)
        if has_codes() and sys.stderr is not None and sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            say(("\x1b[1A\x1b[2K" if self._has_progress else "") + text[:width], painted=True)
            self._has_progress = True
        elif event.files_done == event.num_files or self._clock() - self._progress_s >= EVERY_S:
            self._progress_s = self._clock()
            say(text)

    def _say_details(self, event: events.StepFinished) -> None:
        """Print what a dashboard shows beside the step's line; only of a run whose start was seen."""
        is_last, is_first = event.step == event.num_steps, self._details_step == 0
        if self._state.run is None or not (is_last or self._clock() - self._details_s >= DETAILS_S):
            return
        self._details_s, self._details_step = self._clock(), event.step
        if self._is_verbose:
            for line in details(self._state):
                say(f"  {line}")
        elif not is_first or is_last:  # the first step also measures the layers
            cause, text = advice(self._state) or ("", "")
            if cause and cause not in self._advised:
                self._advised.add(cause)
                say(f"note: {text}")

    def _say_last_details(self) -> None:
        """Print the details of the last step that a stopped run finished, as the frame that stays shows it."""
        step = self._state.step
        if step is not None and step.step != self._details_step:
            self._details_s = -math.inf
            self._say_details(step)


def step_json(event: events.StepFinished) -> str:
    """The step as `watch --json` and `finetune --json` print it: null for a gradient norm that is no number."""
    row = {**dataclasses.asdict(event), "loss_hex": event.loss.hex()}
    row["grad_norm"] = event.grad_norm if math.isfinite(event.grad_norm) else None
    return json.dumps(row)


def evaluation_line(event: events.EvaluationFinished) -> str:
    """`eval 12/100  loss 1.2345  perplexity 3.4  best`, under the lines of the steps."""
    width = len(str(event.num_steps))
    mark = "  best" if event.best else ""
    shown, rewards = f"perplexity {event.perplexity:.4g}", event.preference
    if rewards is not None:
        forms = {"perplexity": "perplexity {:.4g}", "reward_margin": "margin {:.3g}"}
        forms |= {"reward_accuracy": "accuracy {:.0%}", "kl": "kl {:.3g}"}
        shown = "  ".join(form.format(rewards[name]) for name, form in forms.items() if name in rewards)
    return f"eval {event.step:>{width}}/{event.num_steps}  loss {format_loss(event.loss)}  {shown}{mark}"


def step_line(event: events.StepFinished, now_s: float, width: int | None = None) -> str:
    """`step 12/100  epoch 0.36  loss 1.2345  ...  eta 3m10s at 14:32`.

    Of preference pairs it tells the margin, which is to grow, in place of the gradient norm; with a teacher, the
    divergence from it.

    Args:
        width: of a terminal, on one row of which the line stays: the figures that say least are left out.
    """
    compared = event.preference or {}
    margin = compared.get("reward_margin")
    digits = len(str(event.num_steps))
    left = format_seconds(round(event.eta_s)) if event.eta_s >= 1 else "0 s"
    figures = [
        f"step {event.step:>{digits}}/{event.num_steps}",
        *([] if event.epoch is None else [f"epoch {event.epoch:.2f}"]),
        f"loss {format_loss(event.loss)}",
        *([f"kl {compared['kl']:.3g}"] if margin is None and "kl" in compared else []),
        f"grad {event.grad_norm:.2g}" if margin is None else f"margin {margin:.3f}",
        f"lr {event.learning_rate:.1e}",
        f"{event.tokens_per_s:.0f} tok/s",
        f"bubble {100 * event.bubble_ratio:.0f}%",
        f"eta {left} at {format_clock(now_s + event.eta_s, now_s)}" if event.step < event.num_steps else "eta 0 s",
    ]
    for gap, left_out in (("  ", ""), (" ", ""), (" ", "bubble"), (" ", "lr "), (" ", "grad "), (" ", "margin ")):
        figures = [figure for figure in figures if not (left_out and figure.startswith(left_out))]
        line = gap.join(figures)
        if width is None or len(line) + max(0, ETA_COLUMNS - len(figures[-1])) < width:
            break
    return line
