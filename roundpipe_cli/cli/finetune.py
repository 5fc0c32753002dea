"""`roundpipe finetune`: train what a recipe says."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.libraries import go_offline, quiet_libraries
from roundpipe_cli.cli.output import say
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import named_path

if TYPE_CHECKING:
    from roundpipe_cli.costs.find_model import FoundConfig
    from roundpipe_cli.events import Event, Tell
    from roundpipe_cli.planning.question import PlanRequest
    from roundpipe_cli.recipe.load import LoadedRecipe


def finetune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="key=value, e.g. lora.r=32 learning_rate=1e-4.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest valid checkpoint.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One line of JSON per step on stdout, as of watch; no dashboard.")
    ] = False,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Plain lines instead of a dashboard.")] = False,
    allow_changed: Annotated[
        list[str] | None, typer.Option("--allow-changed", metavar="KEY", help="Resume although KEY changed.")
    ] = None,
    allow_other_base: Annotated[
        bool, typer.Option("--allow-other-base", help="Start from an adapter (lora.start_from) of another base model.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Use local files only, open no connection.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write the last steps' work to trace.json, for ui.perfetto.dev.")
    ] = False,
) -> None:
    """Fine-tune a model as a recipe says.

    Example: roundpipe finetune recipes/quickstart.yaml lora.r=8 output_dir=outputs/try
    """
    if os.environ.get("RANK", "0") in ("", "0"):  # of several machines the first one speaks
        say(f"reading {recipe} ...")
    from roundpipe_cli.cli.environment import check_environment
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.signals import StopSignals

    with StopSignals() as signals:
        loaded = load_recipe(recipe, overrides or ())
        is_first = check_environment(loaded.recipe).is_first
        """Whether this is the first of the machines that torchrun started: the others only say what stops them."""
        for text in loaded.notices if is_first else ():
            say(f"note: {text}")
        if offline:
            go_offline()
        if is_first:
            from roundpipe_cli.train.checkpoint.output_dir import refuse_if_held, refuse_wrong_start

            refuse_if_held(named_path(loaded.recipe.output_dir))
            refuse_wrong_start(loaded.recipe, resume=resume)  # again in `check_names`, which takes longer to import
        from roundpipe_cli.cli.display import Display, training_keys
        from roundpipe_cli.cli.lines import LinePrinter
        from roundpipe_cli.cli.publish import make_repository, push_result
        from roundpipe_cli.cli.run_end import show_end
        from roundpipe_cli.planning.run_plan import planned_bytes
        from roundpipe_cli.train.finetune import check_names, fetch_model, found_config
        from roundpipe_cli.train.signals import Reporting, Start

        start = Start(resume, offline, allow_changed or (), allow_other_base)
        plain = LinePrinter(loaded.recipe.logging_steps, as_json=json_) if is_first else _silent
        source = check_names(loaded, start, plain)
        asked = ask_on_cards_worth_using(loaded, plain, found_config(source))
        refuse_too_large(asked)
        if asked is not None and asked.given is not None:
            loaded = asked.given
        if is_first and loaded.recipe.hub_model_id is not None:
            make_repository(loaded.recipe.hub_model_id, offline=offline)
        if is_first:
            say("loading torch and transformers ...")
        quiet_libraries()
        source = fetch_model(loaded, start, plain, source)
        from roundpipe_cli.train.finetune import run_finetune as train

        output_dir = named_path(loaded.recipe.output_dir)
        has_screen = is_first and not (no_dashboard or json_)
        with Display(plain, dashboard=has_screen, keys=training_keys(signals), output_dir=output_dir) as display:
            signals.announce = display.announce
            planned = None if asked is None else functools.partial(planned_bytes, asked)
            reporting = Reporting(display, live=display.is_dashboard, trace=trace, planned=planned)
            train(loaded, start, reporting, signals, source=source, asked=asked)
        if is_first:
            show_end(output_dir)
            if loaded.recipe.hub_model_id is not None:
                say(f"uploading the result to {loaded.recipe.hub_model_id} ...")
                say(f"uploaded to {push_result(output_dir, loaded.recipe.hub_model_id, loaded.recipe.model)}")


def _silent(event: Event) -> None:
    return None


def ask_on_cards_worth_using(loaded: LoadedRecipe, tell: Tell, found: FoundConfig | None = None) -> PlanRequest | None:
    """The planner's question on the GPUs that `plan` uses, with a notice of those left out; None where `plan` has no
    figures for the model.

    Args:
        found: see `ask`.
    """
    from roundpipe_cli.events import Notice
    from roundpipe_cli.planning.question import ask
    from roundpipe_cli.planning.run_plan import leave_small_cards

    asked = None
    with contextlib.suppress(RefusedError):
        asked = ask(loaded, here=True, found=found)
        asked, text = leave_small_cards(asked)
        if text is not None:
            tell(Notice(text))
    return asked


def refuse_too_large(asked: PlanRequest | None) -> None:
    """Exit 5 where `plan` says that it cannot fit. A model that `plan` has no figures for is left to the loader."""
    from roundpipe_cli.planning.run_plan import check_fits

    if asked is not None:
        with contextlib.suppress(RefusedError):
            check_fits(asked)
