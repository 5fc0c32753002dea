"""`roundpipe finetune`: train what a recipe says."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.output import say, say_data
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import (
    CheckpointSaved,
    EvaluationFinished,
    Event,
    Notice,
    Phase,
    RunFinished,
    StepFinished,
)
from roundpipe_cli.units import format_seconds

if TYPE_CHECKING:
    from roundpipe_cli.recipe.load import LoadedRecipe

COLUMNS = 80
"""Of a terminal nobody has widened; a step's line stays on one row of it."""
SAMPLE_CHARACTERS = 200
"""Shown of a generated answer, and of the end of its prompt; eval.jsonl has the whole."""


def finetune(
    recipe: Annotated[str, typer.Argument(help="Recipe file, e.g. recipes/quickstart.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. lora.r=32 learning_rate=1e-4.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest valid checkpoint.")] = False,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Plain lines instead of a dashboard.")] = False,
    allow_changed: Annotated[
        list[str] | None, typer.Option("--allow-changed", metavar="KEY", help="Resume although KEY changed.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use local files only, open no connection.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write the last steps' work to trace.json, for ui.perfetto.dev.")
    ] = False,
) -> None:
    """Fine-tune a model as a recipe says.

    Example: roundpipe finetune recipes/quickstart.yaml lora.r=8 output_dir=outputs/try
    """
    _refuse_loose_equals(overrides or ())
    from roundpipe_cli.cli.display import Display, show_end, training_keys
    from roundpipe_cli.cli.environment import check_environment
    from roundpipe_cli.planning.planned import planned_bytes
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.signals import StopSignals

    with StopSignals() as signals:
        loaded = load_recipe(recipe, overrides or ())
        is_first = check_environment(loaded.recipe).is_first
        """Of the machines that torchrun started: the others only say what stops them."""
        for text in loaded.notices if is_first else ():
            say(f"note: {text}")
        if offline:
            go_offline()
        from roundpipe_cli.train.preflight import check_names

        check_names(loaded, resume=resume, offline=offline)
        refuse_too_large(loaded)
        if is_first:
            say("loading torch and transformers ...")
        quiet_libraries()
        from roundpipe_cli.train.loop import finetune as train

        plain = LinePrinter(loaded.recipe.logging_steps) if is_first else _silent
        with Display(plain, dashboard=is_first and not no_dashboard, keys=training_keys(signals)) as display:
            signals.announce = display.announce
            train(
                loaded,
                resume=resume,
                offline=offline,
                allow_changed=allow_changed or (),
                tell=display,
                signals=signals,
                trace=trace,
                live=display.is_dashboard,
                planned=functools.partial(planned_bytes, loaded),
            )
        if is_first:
            show_end(Path(loaded.recipe.output_dir).expanduser())


def _silent(event: Event) -> None:
    return None


def _refuse_loose_equals(overrides: Sequence[str]) -> None:
    """`lora.r = 8` arrives as three words."""
    for before, word, after in zip(overrides, overrides[1:], overrides[2:], strict=False):
        if word == "=":
            raise RefusedError(
                "no spaces around `=` in an override", found=f"{before} = {after}", hint=f"{before}={after}"
            )


def refuse_too_large(loaded: LoadedRecipe) -> None:
    """Exit 5 where `plan` says that it cannot fit. A model that `plan` has no figures for is left to the loader."""
    from roundpipe_cli.errors import RefusedError
    from roundpipe_cli.planning.predict import check_fits

    with contextlib.suppress(RefusedError):
        check_fits(loaded)


def go_offline() -> None:
    """Keep the hub's libraries from opening connections; they read these variables when imported."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"


def quiet_libraries() -> None:
    """Our own messages say what matters; the libraries' advice is for programmers."""
    import warnings

    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    from transformers.utils import logging

    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


class LinePrinter:
    """Plain lines: one per logged step on stdout, everything else on stderr."""

    def __init__(self, logging_steps: int) -> None:
        self._logging_steps = logging_steps

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            if event.step % self._logging_steps == 0 or event.step in (1, event.num_steps):
                say_data(step_line(event))
        elif isinstance(event, EvaluationFinished):
            say_data(evaluation_line(event))
            for prompt, answer in event.samples:
                say(f"sample: {prompt[-SAMPLE_CHARACTERS:]!r} -> {answer[:SAMPLE_CHARACTERS]!r}")
        elif isinstance(event, Notice):
            say(f"note: {event.text}")
        elif isinstance(event, Phase):
            say(f"{event.text} ...")
        elif isinstance(event, CheckpointSaved):
            waited = f", training waited {format_seconds(event.pause_s)}"
            say(f"checkpoint {event.folder} ({format_seconds(event.seconds)}{waited})")
        elif isinstance(event, RunFinished):
            say(
                f"done: {event.num_steps} steps in {format_seconds(event.seconds)}; the result is in {event.output_dir}"
            )


def evaluation_line(event: EvaluationFinished) -> str:
    """`eval 12/100  loss 1.2345  perplexity 3.4  best`, under the lines of the steps."""
    width = len(str(event.num_steps))
    mark = "  best" if event.best else ""
    return (
        f"eval {event.step:>{width}}/{event.num_steps}  loss {event.loss:.4f}  perplexity {event.perplexity:.4g}{mark}"
    )


def step_line(event: StepFinished) -> str:
    """`step 12/100  loss 1.2345  ...  eta 3m10s`, within 79 columns unless numbers are very long.

    Of preference pairs it tells the margin, which is to grow, in place of the gradient norm.
    """
    margin = (event.preference or {}).get("reward_margin")
    width = len(str(event.num_steps))
    parts = (
        f"step {event.step:>{width}}/{event.num_steps}",
        f"loss {event.loss:.4f}",
        f"grad {event.grad_norm:.2g}" if margin is None else f"margin {margin:.3f}",
        f"lr {event.learning_rate:.1e}",
        f"{event.tokens_per_s:.0f} tok/s",
        f"bubble {100 * event.bubble_ratio:.0f}%",
        f"eta {format_seconds(round(event.eta_s)) if event.eta_s >= 1 else '0 s'}",
    )
    line = "  ".join(parts)
    return line if len(line) < COLUMNS else " ".join(parts)
