"""The door for programs: `from roundpipe_cli import plan, finetune`, the commands with values in and out."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe_cli import torchrun
from roundpipe_cli.cli.output import explained, say, say_at_once
from roundpipe_cli.cli.plan import plan_with_remedies
from roundpipe_cli.cli.training import train_recipe, upload, write_page
from roundpipe_cli.errors import RefusedError, RoundpipeError, as_ours
from roundpipe_cli.events import Event, Notice, Tell, tell_notices
from roundpipe_cli.files import keep_private
from roundpipe_cli.hub.ask import listen
from roundpipe_cli.library_settings import spin_briefly

if TYPE_CHECKING:
    from roundpipe_cli.model.head import TokenLoss
    from roundpipe_cli.recipe.load import LoadedRecipe
    from roundpipe_cli.recipe.schema import Recipe
    from roundpipe_cli.train.signals import StopSignals

RecipeLike = str | os.PathLike[str] | Mapping[str, Any]
"""A recipe's file, the name of a shipped one, or its keys and values as a file has them."""


@dataclass(frozen=True)
class PlanResult:
    """The prediction of `plan`."""

    verdict: str
    """FITS, SLOW or DOES NOT FIT."""
    reasons: tuple[str, ...]
    """Why it is slow, or which memory is short by how much."""
    device_bytes: int
    """Memory of each worker's device that is needed."""
    host_bytes: int
    """Host memory that is needed, while loading or training, whichever is more."""
    step_s: float
    """Seconds of a step."""
    step_range_s: tuple[float, float]
    """Range in which it is to be expected."""
    tokens_per_s: float
    bubble_ratio: float
    forward_stages: tuple[tuple[int, int], ...]
    """First and last layer of each stage; 0 is the embedding, the last one the LM head."""
    backward_stages: tuple[tuple[int, int], ...]
    remedies: tuple[str, ...]
    """Changes that make it fit, or fast, the best one first."""
    notices: tuple[str, ...]
    """Words about what was assumed, or read in another way than it was written."""


@dataclass(frozen=True)
class FinetuneResult:
    """The outcome of a finished run; its speeds are of the steps since the last resume."""

    output_dir: Path
    steps: int
    """Updates of the whole run."""
    losses: Mapping[int, float | None]
    """Training loss of each step, counted from 1; None where it was not finite."""
    first_loss: float | None
    last_loss: float | None
    best_evaluation: float | None
    """Least cross entropy of an evaluation, or loss of pairs; None: there was none."""
    tokens_per_s: float | None
    """Median of the steps; None where none was measured."""
    bubble_ratio: float | None
    seconds: float
    """Seconds of training, of all parts of the run."""


def plan(recipe: RecipeLike, overrides: Mapping[str, Any] | None = None, *, hardware: str | None = None) -> PlanResult:
    """Predict whether a recipe fits and how long a step takes, as `roundpipe plan` does, without GPU or download.

    Args:
        recipe: also the name of a model (a hub id, `package:NAME`), which is then planned with default settings.
        overrides: values by key: `{"lora.r": 32}`.
        hardware: another machine, such as `8x4090,host_memory_gib=256`; None: this one.

    Raises:
        RoundpipeError: see `roundpipe_cli.errors`.
    """
    from roundpipe_cli.planning.what_if import summary_of
    from roundpipe_cli.recipe.load import load_recipe_or_model
    from roundpipe_cli.watchdog import watching

    with _our_errors():
        loaded = _loaded(recipe, overrides, load_recipe_or_model)
        with watching(loaded.recipe.watchdog_s):
            answer, changes, damage = plan_with_remedies(loaded, hardware)
        summary, need = summary_of(answer), answer.verdict
        from roundpipe_cli.train.run_length import run_length

        packing = run_length(answer).packing
        return PlanResult(
            verdict=summary.word,
            reasons=tuple(summary.reasons),
            device_bytes=need.device.total_bytes,
            host_bytes=max(need.host.total_bytes, need.loading.total_bytes),
            step_s=answer.step_s,
            step_range_s=answer.band.around(answer.step_s),
            tokens_per_s=answer.tokens_per_s,
            bubble_ratio=answer.bubble_ratio,
            forward_stages=tuple(answer.cut.forward_stages),
            backward_stages=tuple(answer.cut.backward_stages),
            remedies=tuple(change.what for change in changes),
            notices=(*loaded.notices, *damage, *answer.assumptions, *filter(None, [packing])),
        )


def finetune(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    loss: TokenLoss | None = None,
    on_event: Tell | None = None,
) -> FinetuneResult:
    """Train what a recipe says, as `roundpipe finetune` does; returns when the run is finished.

    Only in the main thread. SIGINT, SIGTERM and SIGHUP end the run at a step border with a checkpoint, as StoppedError.

    Args:
        overrides: values by key: `{"lora.r": 32}`.
        resume: continue from the newest valid checkpoint.
        allow_changed: keys that may differ from the checkpoint's.
        loss: in place of cross entropy: float32 logits [N, V] and targets [N] of a chunk of tokens -> the sum of the
            targets' losses, a tensor without dimensions, which is differentiated by autograd. The run divides by all
            targets of a step. Called by the workers' threads, also at the same time.
        on_event: called with each event of `roundpipe_cli.events`, also by other threads than this; an error in it
            ends the run. None: notices are printed to stderr.

    Raises:
        RoundpipeError: see `roundpipe_cli.errors`; `exit_code` is that of the command.
    """
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.signals import Start

    with _as_the_command() as signals:
        loaded, tell = _loaded(recipe, overrides, load_recipe), partial(_tell, on_event)
        if loss is not None:
            _refuse_loss(loaded.recipe, loss)
        if torchrun.this_process().count > 1:
            raise RefusedError("several machines: not from Python", hint="torchrun -m roundpipe_cli finetune RECIPE")
        listen(lambda text: tell(Notice(text)))
        tell_notices(tell, *loaded.notices)
        start = Start(resume, allow_changed=allow_changed, loss=loss)
        output_dir = train_recipe(loaded, start, signals, tell)
        write_page(output_dir, tell)
        upload(loaded.recipe, tell)
        return _result(output_dir)


def _loaded(
    recipe: RecipeLike, overrides: Mapping[str, Any] | None, read: Callable[[str, Sequence[str]], LoadedRecipe]
) -> LoadedRecipe:
    """The recipe as `read` finds it by its name, or a mapping's; its values are read as those of a file."""
    from roundpipe_cli.recipe.load import load_text

    try:
        words = [f"{key}={_as_json(value)}" for key, value in (overrides or {}).items()]
        text = _as_json(recipe) if isinstance(recipe, Mapping) else os.fspath(recipe)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "texts, numbers, booleans, None, paths, and lists and mappings of these"
        raise RefusedError("the recipe is or holds what no file can", found=str(error), expected=hint) from error
    return load_text(text, "mapping", words) if isinstance(recipe, Mapping) else read(text, words)


def _as_json(value: Any) -> str:
    """A value as a recipe's file may write it."""
    plain = lambda one: dict(one) if isinstance(one, Mapping) else os.fspath(one)  # noqa: E731
    return json.dumps(value, ensure_ascii=False, default=plain)


def _refuse_loss(recipe: Recipe, loss: TokenLoss) -> None:
    """Refuse a loss that the recipe has no place for, or that a checkpoint could not name."""
    if recipe.scores_answers or recipe.objective_kind.needs_teacher:
        raise RefusedError("a loss of tokens is for answers alone", found=f"objective: {recipe.objective}")
    if recipe.label_smoothing_factor:
        found = f"label_smoothing_factor: {recipe.label_smoothing_factor:g}"
        raise RefusedError("label smoothing is of cross entropy", found=found, hint="smooth within the loss function")
    if not callable(loss) or "<lambda>" in getattr(loss, "__qualname__", "<lambda>"):
        hint = "write `def my_loss(logits, targets)`: a resume compares its name"
        raise RefusedError("the loss is no function with a name", found=repr(loss), hint=hint)


def _tell(on_event: Tell | None, event: Event) -> None:
    if on_event is not None:
        try:
            on_event(event)
        except Exception as error:
            raise as_ours(error, "on_event", type(event).__name__) from error
    elif isinstance(event, Notice) and not event.is_detail:
        say(f"note: {event.text}")


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except RoundpipeError:
        raise
    except Exception as error:
        raise explained(error) from error


@contextlib.contextmanager
def _as_the_command() -> Iterator[StopSignals]:
    """Signals, rights of new files, errors and silence of libraries as the command has them; then as before."""
    from roundpipe_cli.train.signals import StopSignals

    if threading.current_thread() is not threading.main_thread():
        hint = "a program of its own, or another process, has one"
        raise RefusedError("finetune: only in the main thread, where signals and the watchdog reach it", hint=hint)
    spin_briefly()
    signals, umask = StopSignals(), keep_private()
    signals.announce = say_at_once
    try:
        with _our_errors(), signals, warnings.catch_warnings():
            yield signals
    finally:
        signals.set_free()
        os.umask(umask)


def _result(output_dir: Path) -> FinetuneResult:
    from roundpipe_cli.dashboard.html import read_report
    from roundpipe_cli.dashboard.replay import GrowingFile
    from roundpipe_cli.events import METRICS_NAME

    report = read_report(output_dir)
    loss, measured = report["loss"], report["measured"]
    return FinetuneResult(
        output_dir=output_dir,
        steps=report["num_steps"],
        losses={row["step"]: row["loss"] for row in GrowingFile(output_dir / METRICS_NAME).new_rows()},
        first_loss=loss["first"],
        last_loss=loss["last"],
        best_evaluation=(report["evaluation"] or {}).get("best_loss"),
        tokens_per_s=measured["tokens_per_s"],
        bubble_ratio=measured["bubble_ratio"],
        seconds=report["seconds"],
    )
