"""Training what a recipe says, for the command and for programs: checks before torch is loaded, the run, the upload."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe_cli import torchrun
from roundpipe_cli.cache import cache_folder
from roundpipe_cli.cli.output import quiet_libraries, say
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.events import Notice, Phase
from roundpipe_cli.faults import load_faults
from roundpipe_cli.files import write_named
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.regular_files import named_path

if TYPE_CHECKING:
    from roundpipe_cli.cli.display import Display
    from roundpipe_cli.costs.find_model import FoundConfig
    from roundpipe_cli.events import Tell
    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.planning.question import PlanRequest
    from roundpipe_cli.recipe.load import LoadedRecipe
    from roundpipe_cli.train.nodes.group import Nodes
    from roundpipe_cli.train.signals import Start, StopSignals

# Environment variables that a run reads; impossible values are refused before anything starts. No torch.

YES, NO = ("1", "ON", "YES", "TRUE"), ("", "0", "OFF", "NO", "FALSE")
"""As huggingface_hub reads them; it takes anything else for no."""
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_environment(recipe: Recipe) -> torchrun.Process:
    """Place of this process in the run, when all variables make sense.

    Raises:
        RefusedError: one does not, or the recipe asks for what several processes cannot share.
    """
    for name in SWITCHES:
        value = os.environ.get(name, "")
        if value.strip().upper() not in (*YES, *NO):
            raise RefusedError(
                "an environment variable is neither yes nor no, and the hub would be asked",
                where=name,
                found=repr(value),
                expected="1 or 0",
                hint=f"export {name}=1",
            )
        if not value.strip():
            os.environ.pop(name, None)  # PEFT refuses an empty value when it saves
    cache_folder("data")  # refuses a path that cannot be one
    load_faults()
    process = torchrun.this_process()
    if process.num_local > 1 and recipe.pipeline.devices == "auto":
        raise RefusedError(
            "several processes on one machine would each take all of its devices",
            where="LOCAL_WORLD_SIZE",
            found=f"{process.num_local} processes on this machine, pipeline.devices: auto",
            expected="one process on each machine: it drives all of the machine's devices",
            hint="torchrun --nproc-per-node 1, or roundpipe without torchrun; else name pipeline.devices",
        )
    if process.count > 1:
        from roundpipe_cli.planning.admission import check_shareable

        check_shareable(recipe, process.count)
    if notice := torchrun.launched_without_ranks():
        say(f"note: {notice}")
    return process


def with_row_length(loaded: LoadedRecipe, source: ModelSource, *, offline: bool, tell: Tell) -> LoadedRecipe:
    """The recipe with `max_seq_length: auto` decided, for which alone torch and its rows are loaded now."""
    if loaded.recipe.max_seq_length != "auto":
        return loaded
    quiet_libraries()
    from roundpipe_cli.train.prepare import rows

    return rows.with_row_length(loaded, source, offline=offline, tell=tell)


def ask_on_cards_worth_using(loaded: LoadedRecipe, tell: Tell, found: FoundConfig | None = None) -> PlanRequest | None:
    """The planner's question on the GPUs that `plan` uses, with a notice of those left out; None where `plan` has no
    figures for the model."""
    from roundpipe_cli.costs.machine import NOT_USED
    from roundpipe_cli.costs.measurement import MEASURED_ON
    from roundpipe_cli.planning.question import ask
    from roundpipe_cli.planning.run_plan import leave_small_cards

    asked = None
    with contextlib.suppress(RefusedError):
        asked = ask(loaded, here=True, found=found)
        for note in asked.machine.notes:
            if note.startswith((MEASURED_ON, NOT_USED)):
                tell(Notice(note.removeprefix("note: ")))
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


def train_recipe(
    loaded: LoadedRecipe,
    start: Start,
    signals: StopSignals,
    tell: Tell,
    *,
    screen: Callable[[Path], Display] | None = None,
    trace: bool = False,
    nodes: Nodes | None = None,
) -> Path:
    """Check all that can be checked without torch, then train into the output directory, which is returned.

    Args:
        tell: called with events until there is a screen.
        screen: opened when the workers are about to start, for the output directory.
        trace: see `Reporting`.
        nodes: see `run_finetune`.

    Raises:
        RoundpipeError: with the documented exit code.
    """
    is_first = check_environment(loaded.recipe).is_first
    if nodes is not None:
        nodes.meet(loaded.recipe)
    if is_first:
        from roundpipe_cli.train.checkpoint.output_dir import refuse_if_held, refuse_wrong_start

        refuse_if_held(named_path(loaded.recipe.output_dir))
        if torchrun.was_restarted():
            from roundpipe_cli.train.preflight import as_restarted

            loaded, start = as_restarted(loaded, start)
        refuse_wrong_start(loaded.recipe, resume=start.resume)
    else:  # the first machine alone looks at the output directory
        loaded = replace(loaded, recipe=replace(loaded.recipe, resume_from_checkpoint=None))
        start = replace(start, resume=False)
    from roundpipe_cli.cli.export import make_repository
    from roundpipe_cli.planning.run_plan import planned_bytes, reason_against
    from roundpipe_cli.train.monitor.trackers import require_trackers
    from roundpipe_cli.train.preflight import check_sources, fetch_model, found_config
    from roundpipe_cli.train.signals import Reporting

    if is_first:
        require_trackers(loaded.recipe.report_to)
    source = check_sources(loaded, start, tell)
    loaded = with_row_length(loaded, source, offline=start.offline, tell=tell)
    asked = ask_on_cards_worth_using(loaded, tell, found_config(source))
    refuse_too_large(asked)
    loaded = loaded if asked is None else asked.given
    if is_first and loaded.recipe.hub_model_id is not None:
        make_repository(loaded.recipe.hub_model_id, offline=start.offline)
    tell(Phase("loading torch and transformers"))
    quiet_libraries()
    source = fetch_model(loaded, start, tell, source)
    from roundpipe_cli.train.finetune import run_finetune

    output_dir = named_path(loaded.recipe.output_dir)
    planned = None if asked is None else partial(planned_bytes, asked)
    refused = None if asked is None else partial(reason_against, asked)
    with contextlib.nullcontext() if screen is None else screen(output_dir) as display:
        live = display is not None and display.is_dashboard
        reporting = Reporting(display or tell, live=live, trace=trace, planned=planned, refused=refused)
        run_finetune(loaded, start, reporting, signals, source=source, asked=asked, nodes=nodes)
    return output_dir


def upload(recipe: Recipe, tell: Tell) -> None:
    """Upload the result of a finished run, if its recipe asks for it."""
    if recipe.hub_model_id is not None:
        from roundpipe_cli.cli.export import push_result

        tell(Phase(f"uploading the result to {recipe.hub_model_id}"))
        tell(Notice(f"uploaded to {push_result(named_path(recipe.output_dir), recipe.hub_model_id)}"))


PAGE_NAME = "report.html"


def write_page(output_dir: Path, tell: Tell) -> None:
    """Write a finished run's page, if the disk takes it: the result itself is complete."""
    from roundpipe_cli.dashboard.html import report_page

    try:
        write_named(output_dir / PAGE_NAME, report_page(output_dir))
    except RoundpipeError as error:
        tell(Notice(f"no {PAGE_NAME}: {error}"))
