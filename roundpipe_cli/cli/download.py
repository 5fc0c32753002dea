"""`roundpipe download`: fetch a hub model into the hub's own cache, before it is trained."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli.cli.output import go_offline, quiet_libraries, say, say_data, say_json
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice
from roundpipe_cli.hub.ask import UnreachableError
from roundpipe_cli.units import counted, format_bytes

if TYPE_CHECKING:
    from roundpipe_cli.hub.download import Listing
    from roundpipe_cli.recipe.load import LoadedRecipe


def download(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id such as Qwen/Qwen3-8B, or a recipe file.", show_default=False)
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit. [default: the default branch]")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout: the folder and its files.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Only say where it is in the cache.")] = False,
) -> None:
    """Fetch what training needs of a hub model: configuration and tokenizer first, then exactly its weights.

    Files that an earlier run fetched are kept; one that was cut off starts again. A recipe file is planned first, and
    weights that cannot fit here are not fetched.

    Example: roundpipe download Qwen/Qwen3-0.6B
    """
    say(f"looking for {model} ...")
    from roundpipe_cli.train.signals import StopSignals

    if offline:
        go_offline()
    with StopSignals("; finished files are kept, and the same command fetches the rest"):
        loaded = _recipe(model, revision)
        document = _fetch(model, revision, offline=offline) if loaded is None else _fetch_for(loaded, offline=offline)
    if json_:
        say_json(document, indent=None)
    else:
        say_data(document["folder"])


def _recipe(model: str, revision: str | None) -> LoadedRecipe | None:
    if not model.endswith((".yaml", ".yml")):
        return None
    from roundpipe_cli.recipe.load import load_recipe

    if revision is not None:
        raise RefusedError("a recipe names its own revision", where="--revision", hint="set `revision:` in it")
    return load_recipe(model, ())


def _fetch_for(loaded: LoadedRecipe, *, offline: bool) -> dict[str, Any]:
    """Check the model, ask `plan`'s verdict and prove the model before the weights are fetched, as `finetune` does."""
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.cli.training import ask_on_cards_worth_using, refuse_too_large
    from roundpipe_cli.train.preflight import check_base, found_config, prove_unfetched
    from roundpipe_cli.train.run_length import with_estimated_length
    from roundpipe_cli.train.signals import Start

    printer, start = LinePrinter(1), Start(offline=offline)
    source = check_base(loaded, start, printer)
    loaded = with_estimated_length(loaded)
    asked = ask_on_cards_worth_using(loaded, printer, found_config(source))
    refuse_too_large(asked)
    if source.commit is not None:
        quiet_libraries()
        prove_unfetched(loaded if asked is None else asked.given, source, start, printer)
    return _fetch(loaded.recipe.model, loaded.recipe.revision, offline=offline, folder=loaded.folder)


def _fetch(model: str, revision: str | None, *, offline: bool, folder: Path | None = None) -> dict[str, Any]:
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.hub.download import find_listing, missing_bytes, missing_files
    from roundpipe_cli.model.files.source import fetch_configuration, is_hub_model, resolve_model

    place, tell = folder or Path.cwd(), LinePrinter(1)
    to_bring: dict[str, int] = {}
    if is_hub_model(model, place):
        with suppress(UnreachableError):  # `resolve_model` looks in the cache, and says so
            listing = find_listing(model, revision, offline=offline, tell=lambda text: tell(Notice(text)))
            to_bring = {name: missing_bytes(listing, [name]) for name in missing_files(listing, [*listing.files])}
            _announce(listing, fetch_configuration(listing, tell))
    source = resolve_model(model, revision=revision, recipe_folder=place, offline=offline, tell=tell)
    paths = [path for path in sorted(source.folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(source.folder).as_posix(): path.stat().st_size for path in paths}
    fetched = {name: num_bytes for name, num_bytes in to_bring.items() if name in files}
    sums = {"total_bytes": sum(files.values()), "fetched_bytes": sum(fetched.values())}
    found = {"model": model, "revision": revision, "commit": source.commit, "folder": str(source.folder)}
    return {**found, "files": files, **sums, "fetched_files": list(fetched)}


def _announce(listing: Listing, folder: Path) -> None:
    """Say what is going to be fetched, and how much of it is here; refuse what no run could train."""
    from roundpipe_cli.hub.download import missing_bytes, missing_files
    from roundpipe_cli.model.files.source import ModelSource, small_files, weight_files

    weights = weight_files(listing, folder)
    names = [*small_files(listing), *weights]
    missing, total = missing_files(listing, weights), listing.num_bytes(names)
    left = missing_bytes(listing, weights)
    if missing:
        from roundpipe_cli.model.load import load_config  # loads torch

        quiet_libraries()
        load_config(ModelSource(listing.repository.name, folder))
    say(f"{listing.repository.name} at commit {listing.commit}: {counted(len(names), 'file')}, {format_bytes(total)}")
    here = f"{counted(len(names) - len(missing), 'file')}, {format_bytes(total - left)}"
    say(f"in {folder}; here already: {here}")
    if missing:
        say(f"to fetch: {counted(len(missing), 'file')} of weights, {format_bytes(left)}")
