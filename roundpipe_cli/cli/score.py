"""`roundpipe score`: the loss of each row of a dataset, and the most probable tokens, by the engine's forward."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli import torchrun
from roundpipe_cli.cli.options import BaseOption, OfflineOption, OtherBaseOption
from roundpipe_cli.cli.output import go_offline, load_libraries, say, say_data, say_json
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import tell_notices
from roundpipe_cli.regular_files import named_path, tried_paths
from roundpipe_cli.units import counted, format_loss

if TYPE_CHECKING:
    from roundpipe_cli.cli.export import FoundResult
    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.planning.question import PlanRequest
    from roundpipe_cli.recipe.load import LoadedRecipe


def score(
    target: Annotated[str, typer.Argument(metavar="RECIPE|RESULT", help="Also a model, or a checkpoint's folder.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Rows: a file, glob, folder or hub dataset.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of the recipe.")] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="FOLDER", help="To write, or to continue in.")] = None,
    per_token: Annotated[bool, typer.Option("--per-token", help="Also each target's log-probability.")] = False,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", min=0, max=1024, help="Also the N most probable tokens there.")
    ] = 0,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    offline: OfflineOption = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Score rows as the recipe reads them: one forward, with the weights as the run has them, and no backward.

    A call that ended early is continued by the same command. Without --to: OUTPUT_DIR/scores-DATA, of a recipe
    OUTPUT_DIR-base/scores-DATA.

    Example: roundpipe score outputs/quickstart recipes/quickstart.jsonl
    """
    say(f"reading {target} ...")
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.train.signals import StopSignals

    with StopSignals(": the same command continues behind the rows that are written"), contextlib.ExitStack() as stack:
        rows = partial(_with_rows, path=data, overrides=overrides or ())
        opened = opened_target(target, overrides or (), base, rows=rows, offline=offline)
        loaded, source, asked, folder_of = stack.enter_context(opened)
        from roundpipe_cli.train.checkpoint.output_dir import OutputDir
        from roundpipe_cli.train.score import ScoreFolder, prepare_to_score
        from roundpipe_cli.watchdog import watching

        name = re.sub(r"\W+", "-", Path(data).stem).strip("-") or "rows"
        folder, tell = named_path(to or folder_of(f"scores-{name}")), LinePrinter(1)
        loaded = replace(loaded, recipe=replace(loaded.recipe, output_dir=str(folder)))  # of weights on disk
        with watching(loaded.recipe.watchdog_s), OutputDir(folder, key="--to"):
            setup = prepare_to_score(loaded, source, asked, offline=offline, allowed=allow_other_base, tell=tell)
            found = ScoreFolder(folder, setup, top_k if top_k or per_token else None).fill(tell)
    if json_:
        say_json({"folder": str(folder), **found}, indent=None)
        return
    of = f"{counted(found['tokens'], 'token')} of {counted(found['rows'], 'row')}"
    say_data(f"loss {format_loss(found['loss'])}  perplexity {found['perplexity']:.4g}  {of}")
    say_data(str(folder))


@contextlib.contextmanager
def opened_target(
    target: str,
    overrides: Sequence[str],
    base: str | None,
    *,
    rows: Callable[[LoadedRecipe], LoadedRecipe],
    offline: bool,
    before: bool = False,
) -> Iterator[tuple[LoadedRecipe, ModelSource, PlanRequest | None, Callable[[str], Path]]]:
    """The recipe that computes what `target` names, its model with all of its files, the planner's question, and the
    folder for something of a name.

    Args:
        target: a recipe, a model, or the folder of a result or a checkpoint.
        base: as of `opened_result`.
        rows: gives the recipe the rows that are computed, and no others.
        before: of a result, its recipe without it: as it was before training.

    Raises:
        RefusedError: there is no such thing, or torchrun started several processes.
    """
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.cli.training import ask_on_cards_worth_using, check_environment, with_row_length
    from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
    from roundpipe_cli.train.preflight import check_sources, fetch_model, found_config
    from roundpipe_cli.train.signals import Start

    if (count := torchrun.this_process().count) > 1:
        raise RefusedError("scores: not with several machines", found=f"{count} processes", hint="leave torchrun out")
    if offline:
        go_offline()
    found, source = find_target(target, overrides, base), None
    with contextlib.ExitStack() as stack:
        if isinstance(found, LoadedRecipe):
            loaded, folder_of = found, lambda name: Path(f"{found.recipe.output_dir}-base") / name
        else:
            from roundpipe_cli.cli.export import find_adapter_base, opened_result

            opened = opened_result(found, base, offline=offline, needs_base=False, allowed=False)
            result, source = stack.enter_context(opened)
            file = result / "recipe.yaml"
            if not file.is_file():
                hint = f"name a recipe in its place, with lora.start_from={shlex.quote(target)}"
                raise RefusedError("no recipe.yaml says how to read rows for this result", where=target, hint=hint)
            loaded, folder_of = load_recipe(file, overrides), found.default_target
            recipe, name = loaded.recipe, str(result.absolute())
            if found.kind == "adapter":
                source = source or find_adapter_base(result, base, offline=offline)
                recipe = recipe if before else replace(recipe, lora=replace(recipe.lora, start_from=name))
            elif not before:
                recipe, source = replace(recipe, model=name, revision=None), None
            loaded = replace(loaded, recipe=recipe)
        check_environment(loaded.recipe)
        loaded, start, tell = rows(loaded), Start(offline=offline), LinePrinter(1)
        tell_notices(tell, *loaded.notices)
        place = check_sources(loaded, start, tell, source)
        loaded = with_row_length(loaded, place, offline=offline, tell=tell)
        asked = ask_on_cards_worth_using(loaded, tell, found_config(place))
        loaded = loaded if asked is None else asked.given
        load_libraries()
        yield loaded, source or fetch_model(loaded, start, tell, place), asked, folder_of


def find_target(target: str, overrides: Sequence[str], base: str | None) -> LoadedRecipe | FoundResult:
    """The recipe, or the result, that `target` names; without torch.

    Raises:
        RefusedError: there is no such thing, or a recipe has no use for `base`.
    """
    from roundpipe_cli.cli.export import find_result
    from roundpipe_cli.recipe.load import load_recipe_or_model

    if is_result(target):
        return find_result(Path(target))
    if base is not None:
        hint = f"leave --base out, or model={shlex.quote(base)}"
        raise RefusedError("--base is the base model of a result", where=target, found="a recipe", hint=hint)
    return load_recipe_or_model(target, overrides)


def is_result(target: str) -> bool:
    """Whether a target is the folder of a run or checkpoint; not a recipe, nor a model."""
    run = Path(target)
    is_model = (run / "config.json").is_file() and not (run / "recipe.yaml").is_file()
    return not is_model and (run.is_dir() or re.fullmatch(r"step-\d+", run.name) is not None)


def _with_rows(loaded: LoadedRecipe, path: str, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe with the rows of `path` alone: as its entry of that place reads them, else as its first entry does,
    whose configuration, split and pairs are other rows' own unless an override says how to read these."""
    from roundpipe_cli.recipe.schema import DatasetConfig, with_rows_alone

    def place_of(name: str) -> str:
        return next((str(one.resolve()) for one in tried_paths(name, loaded.folder) if one.exists()), name)

    recipe, plain = loaded.recipe, DatasetConfig(path=path)
    first, place = replace(recipe.datasets[0], path=path), place_of(path)
    if not (is_said := any(re.match(r"[~+]*datasets\b", word) for word in overrides)):
        first = replace(first, name=plain.name, split=plain.split)
    entry = next((one for one in (*recipe.datasets, *recipe.eval_datasets) if place_of(one.path) == place), first)
    if recipe.scores_answers and not is_said:
        entry = replace(entry, type=plain.type, columns=plain.columns)
    return replace(loaded, recipe=with_rows_alone(recipe, entry))
