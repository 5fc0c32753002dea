"""Checks before torch is loaded, so that a wrong name is reported within a second or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundpipe_cli.costs.find_model import FoundConfig, read_gguf_config
from roundpipe_cli.data.settings import errors_of, spec_of
from roundpipe_cli.data.sources import find_sources
from roundpipe_cli.data.teacher import find_teacher
from roundpipe_cli.events import Tell
from roundpipe_cli.model.files.source import ModelSource, is_hub_model, resolve_model
from roundpipe_cli.planning.admission import check_configuration, holds_weights
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.sizes import check_sizes
from roundpipe_cli.torchrun import was_restarted
from roundpipe_cli.train.checkpoint.manifest import peek
from roundpipe_cli.train.checkpoint.output_dir import list_checkpoints, named_checkpoint
from roundpipe_cli.train.floors import check_floors
from roundpipe_cli.train.signals import Start


def as_restarted(loaded: LoadedRecipe, start: Start) -> tuple[LoadedRecipe, Start]:
    """The run as torchrun's restart of it begins: from its own newest checkpoint, wherever it began before."""
    recipe = loaded.recipe
    if not (was_restarted() and list_checkpoints(named_path(recipe.output_dir))):
        return loaded, start
    from roundpipe_cli.train.nodes.group import has_begun

    if not has_begun(recipe.output_dir):  # it was refused, and is refused again
        return loaded, start
    return replace(loaded, recipe=replace(recipe, resume_from_checkpoint="auto")), replace(start, resume=True)


def check_sources(loaded: LoadedRecipe, start: Start, tell: Tell, source: ModelSource | None = None) -> ModelSource:
    """Check that model, rows and a teacher's scores exist, see `check_base`; `source`: the model, if it was found."""
    recipe = loaded.recipe
    source = source or check_base(loaded, start, tell)
    for key in ("datasets", "eval_datasets"):
        with errors_of(key):
            for entry in getattr(recipe, key):
                find_sources(spec_of(entry, recipe.objective_kind.example), loaded.folder, start.offline)
    if recipe.objective_kind.needs_teacher:
        find_teacher(recipe.distill.teacher, loaded.folder)
    return source


def check_base(loaded: LoadedRecipe, start: Start, tell: Tell) -> ModelSource:
    """Check that the model exists; of a hub model everything but the weights is fetched and checked.

    Raises:
        RefusedError: no such model, one that cannot be trained, or a library with a known hole.
    """
    recipe = loaded.recipe
    check_floors()
    source = resolve_model(
        recipe.model,
        revision=base_revision(recipe, start),
        recipe_folder=loaded.folder,
        offline=start.offline,
        weights=not is_hub_model(recipe.model, loaded.folder),  # else only what is small is fetched yet
        tell=tell,
    )
    if source.gguf_file is not None:  # before a library opens it
        file = source.folder / source.gguf_file
        check_sizes(read_gguf_config(file), str(file))
    if source.commit is not None:  # before the weights are fetched
        check_configuration(FoundConfig(source.config, source.name, recipe.model, source.folder), recipe)
    return source


def found_config(source: ModelSource) -> FoundConfig | None:
    """The configuration of a local folder that was checked, for `ask`; None for other models, which it looks for."""
    if source.commit is not None or source.gguf_file is not None:
        return None
    return FoundConfig(source.config, source.name, str(source.folder / "config.json"), source.folder, is_local=True)


def fetch_model(loaded: LoadedRecipe, start: Start, tell: Tell, source: ModelSource) -> ModelSource:
    """Download the weights of a hub model that are not here yet, once it is proven; returns the place of the model.
    `source`: as `check_base` found it."""
    recipe = loaded.recipe
    if is_hub_model(recipe.model, loaded.folder):
        prove_unfetched(loaded, source, start, tell)
        revision = base_revision(recipe, start)
        source = resolve_model(
            recipe.model, revision=revision, recipe_folder=loaded.folder, offline=start.offline, tell=tell
        )
    return source


def prove_unfetched(loaded: LoadedRecipe, source: ModelSource, start: Start, tell: Tell) -> None:
    """Refuse a hub model that does not pass the proof before its weights are fetched. Loads torch if they are to be."""
    found = FoundConfig(source.config, source.name, loaded.recipe.model, source.folder)
    if start.offline or holds_weights(found):
        return
    from roundpipe_cli.train.prepare.setup import prove_from_configuration

    prove_from_configuration(loaded, source, tell)


def base_revision(recipe: Recipe, start: Start) -> str | None:
    """The revision of the base model: of a run that continues the commit it began with, whatever the hub has now."""
    if not (start.resume or recipe.resume_from_checkpoint is not None):
        return recipe.revision
    named = named_checkpoint(recipe)
    folders = [named] if named else [folder for _, folder in list_checkpoints(named_path(recipe.output_dir))]
    meta = next(filter(None, map(peek, folders)), None)
    return recipe.revision if meta is None else begun_with(meta, recipe, start.allow_changed)


def begun_with(saved: Mapping[str, Any], recipe: Recipe, allowed: Sequence[str]) -> str | None:
    """Revision of the base of a run whose checkpoint has the meta `saved`; `model` among the `allowed` changes asks for
    the hub's newest again."""
    before = saved.get("recipe")
    commit = saved.get("model_commit")
    if not isinstance(before, dict) or not isinstance(commit, str) or "model" in {key.split(" ")[0] for key in allowed}:
        return recipe.revision
    is_same = before.get("model") == recipe.model and before.get("revision") == recipe.revision
    return commit if is_same else recipe.revision
