"""A run from its recipe to its result: the output directory, the machines, the checkpoint to continue from."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Tell, run_clock, tell_notices
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.head import loss_name
from roundpipe_cli.model.trained_on import check_trained_on
from roundpipe_cli.planning.question import PlanRequest, ask_again
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.train.checkpoint.output_dir import (
    OutputDir,
    RunState,
    is_of_other_run,
    list_checkpoints,
    missing_from_result,
    named_checkpoint,
    no_checkpoint,
)
from roundpipe_cli.train.checkpoint.reading import Checkpoint, load_newest
from roundpipe_cli.train.checkpoint.resume import (
    as_decided,
    check_more_is_possible,
    check_not_past_end,
    check_state,
    check_unchanged,
    describe_other_bits,
    is_complete,
    may_ask_for_more,
)
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.machines import Machines
from roundpipe_cli.train.monitor.telemetry import EventRecorder
from roundpipe_cli.train.nodes.agreement import setup_facts
from roundpipe_cli.train.nodes.group import Nodes, has_begun
from roundpipe_cli.train.preflight import begun_with
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import ask_here, prepare
from roundpipe_cli.train.prepare.trainable import start_folder
from roundpipe_cli.train.run_length import tell_forecast
from roundpipe_cli.train.signals import Reporting, Start, StopSignals
from roundpipe_cli.watchdog import watching


def run_finetune(
    loaded: LoadedRecipe,
    start: Start,
    reporting: Reporting,
    signals: StopSignals,
    *,
    source: ModelSource | None = None,
    asked: PlanRequest | None = None,
    nodes: Nodes | None = None,
) -> None:
    """Train what the recipe says, into its output directory.

    Args:
        signals: active; asks for a stop.
        source: the model's files, where they were found and checked before; of the revision that `base_revision` says.
        asked: see `ask_here`.
        nodes: the processes of the run, which have met; None: this one alone.

    Raises:
        RoundpipeError: with the documented exit code.
    """
    recipe = loaded.recipe
    nodes = nodes or Nodes()
    with ExitStack() as stack:
        output_dir = named_path(recipe.output_dir)
        resume = start.resume or recipe.resume_from_checkpoint is not None
        if not nodes.is_first:  # nobody reads what it writes
            output_dir, resume = Path(stack.enter_context(tempfile.TemporaryDirectory())), False
        is_other = resume and is_of_other_run(recipe, output_dir)
        held = stack.enter_context(OutputDir(output_dir, resume and not is_other))
        if nodes.is_first:
            nodes.may_resume = lambda: bool(list_checkpoints(output_dir))
            has_begun(recipe.output_dir, now=True)
        tell = recorder = EventRecorder(output_dir, run_clock(), reporting.tell)
        missing = missing_from_result(output_dir) if held.state is RunState.FINISHED else []
        if missing:
            tell(Notice(f"files of the result are gone: {', '.join(missing)}; it is written from the last checkpoint"))
            if not list_checkpoints(output_dir):
                raise no_checkpoint(output_dir, f"a result without {', '.join(missing)}, and nothing named step-*")
        finished = nodes.from_first(held.state is RunState.FINISHED and not missing)
        if nodes.from_first(finished and not may_ask_for_more(output_dir, loaded, start.loss)):
            tell(Notice(f"this run is finished: the result is in {output_dir}; nothing was changed"))
            return
        checkpoint = None
        if resume:
            checkpoint = load_newest(output_dir, named_checkpoint(recipe), lambda text: tell(Notice(text)))
            check_state(checkpoint)
        checkpoint = nodes.share_checkpoint(checkpoint)
        if checkpoint is not None:
            by_rows, loaded = loaded.recipe.max_seq_length, as_decided(loaded, checkpoint.meta["recipe"])
            if loaded.recipe.max_seq_length != by_rows:
                tell(Notice(f"max_seq_length={loaded.recipe.max_seq_length}: as when this run began"))
            _check_kept_chunks(loaded, asked)
        else:
            tell_notices(tell, loaded.rate_note)
        with watching(recipe.watchdog_s):
            if checkpoint is not None:
                source = _base_of(checkpoint, loaded, start, source, tell=tell)
            machines = Machines(nodes)
            setup = prepare(
                loaded,
                offline=start.offline,
                tell=tell,
                source=source,
                asked=asked,
                smallest=lambda tokens: -nodes.most([-tokens])[0],
                elsewhere=partial(machines.share_out, recipe, tell),
            )
            if start.loss is not None:
                setup.loss = start.loss
                scored = ", which evaluations do not use: theirs is cross entropy" if setup.eval_rows else ""
                tell(Notice(f"loss: {loss_name(start.loss)}, of this program{scored}"))
            nodes.check_same(lambda: setup_facts(setup))
            _check_base(setup, checkpoint, loaded, start, tell=tell)
            trainer = Trainer(
                setup, output_dir, signals, reporting, machines=machines, recorder=recorder, checkpoint=checkpoint
            )
            if checkpoint is not None:
                check_not_past_end(checkpoint, trainer.num_steps)
                if finished and (why := is_complete(checkpoint, recipe, trainer.num_steps)):
                    check_more_is_possible(checkpoint, recipe, why)
                    tell(Notice(f"this run is finished: {why}; the result is in {output_dir}; nothing was changed"))
                    return
            left = trainer.num_steps - (0 if checkpoint is None else checkpoint.step)
            here = partial(ask_here, loaded, asked)
            tell_forecast(here, setup.recipe, trainer.sampler, left, machines=machines.nodes.count, tell=tell)
            trainer.run(start.lost_at)


def _base_of(
    checkpoint: Checkpoint, loaded: LoadedRecipe, start: Start, source: ModelSource | None, *, tell: Tell
) -> ModelSource:
    """The model's files of the revision with which a run began."""
    recipe = loaded.recipe
    revision = begun_with(checkpoint.meta, recipe, start.allow_changed)
    if source is None or source.commit not in (None, revision):
        folder, offline = loaded.folder, start.offline
        source = resolve_model(recipe.model, revision=revision, recipe_folder=folder, offline=offline, tell=tell)
    if revision != recipe.revision and source.commit is not None:
        tell(Notice(f"base model: commit {source.commit[:12]}, with which the run began"))
    return source


def _check_base(setup: Setup, checkpoint: Checkpoint | None, loaded: LoadedRecipe, start: Start, *, tell: Tell) -> None:
    """Refuse a run that continues as another one, or an adapter of another base model."""
    if checkpoint is not None:
        changed = check_unchanged(checkpoint.meta, setup, start.allow_changed)
        tell_notices(tell, *changed, describe_other_bits(checkpoint.meta, setup))
    elif (folder := start_folder(loaded)) is not None:
        same = partial(check_trained_on, weights=lambda: setup.model_hash, where="model")
        tell_notices(tell, same(folder, setup.source, allowed=start.allow_other_base))


def _check_kept_chunks(loaded: LoadedRecipe, asked: PlanRequest | None) -> None:
    """Refuse to go on with the chunks with which a run began where this machine's memory needs more of them."""
    if asked is not None and asked.loaded.recipe.pipeline.num_chunks > loaded.recipe.pipeline.num_chunks:
        with suppress(RefusedError):  # another check reports what is wrong
            check_fits(ask_again(asked, loaded))
