"""Checks before torch is loaded, so that a wrong name is told within a second or two."""

from __future__ import annotations

from roundpipe_cli.costs.gguf_header import read_gguf_config
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import find_sources
from roundpipe_cli.model.source import check_model_name
from roundpipe_cli.model_sizes import check_sizes
from roundpipe_cli.plain_files import named_path
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.train.checkpoint.output_dir import check_start, is_of_other_run
from roundpipe_cli.train.floors import check_floors
from roundpipe_cli.train.monitor.trackers import require_trackers


def check_names(loaded: LoadedRecipe, *, resume: bool, offline: bool) -> None:
    """Output directory, model and datasets: are they there, and may a run start?

    Raises:
        RefusedError: no such model, dataset or tracker, or the output directory holds another run.
        NoCheckpointError: nothing to resume from.
    """
    recipe = loaded.recipe
    output_dir = named_path(recipe.output_dir)
    resume = resume or recipe.resume_from_checkpoint is not None
    check_start(output_dir, resume and not is_of_other_run(recipe, output_dir))
    require_trackers(recipe.report_to)
    check_sources(loaded, offline=offline)


def check_sources(loaded: LoadedRecipe, *, offline: bool) -> None:
    """Model and datasets: are they there?

    Raises:
        RefusedError: no such model or dataset, or a library with a known hole.
    """
    recipe = loaded.recipe
    check_floors()
    source = check_model_name(recipe.model, revision=recipe.revision, recipe_folder=loaded.folder, offline=offline)
    if source is not None and source.gguf_file is not None:  # before a library opens it
        file = source.folder / source.gguf_file
        check_sizes(read_gguf_config(file), str(file))
    for dataset in (*recipe.datasets, *recipe.eval_datasets):
        # The type and the columns are looked at later.
        spec = DatasetSpec(dataset.path, split=dataset.split, name=dataset.name, txt_rows=dataset.txt_rows)
        find_sources(spec, loaded.folder, offline)
