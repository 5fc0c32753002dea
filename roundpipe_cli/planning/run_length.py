"""How long a run will be, as far as its recipe and the files that it names say."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from roundpipe_cli.planning.row_counts import RowCount, cached_hub_rows, count_rows
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import DatasetConfig

BYTES_PER_TOKEN = 4
"""Bytes of text a token: usual for English and code (assumed); other languages have fewer, so longer runs."""
SLICE = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>\d*):(?P<stop>\d*)\])?")


@dataclass(frozen=True, slots=True)
class RunLength:
    """Optimizer steps of a whole run."""

    steps: int | None
    """None: the rows cannot be counted here."""
    why: str
    """How the number is known, or why it is not."""
    is_packed: bool = False
    """Rows are packed, so there are fewer sequences than rows."""


def length_of(loaded: LoadedRecipe, *, packs: bool = False) -> RunLength:
    """The length of a recipe's run.

    Args:
        packs: rows will be packed, by the recipe or by what `auto` is for the model.
    """
    recipe = loaded.recipe
    if recipe.max_steps is not None:
        return RunLength(recipe.max_steps, "max_steps", packs)
    counts = []
    for dataset in recipe.datasets:
        found = _rows_of(dataset, loaded.folder)
        if found is None:
            return RunLength(None, f"the rows of {dataset.path} cannot be counted here", packs)
        counts.append(found)
    rows = sum(count.num_rows for count in counts)
    held_out = recipe.val_set_size if recipe.val_set_size >= 1 else recipe.val_set_size * rows
    trained = max(0, rows - int(held_out))
    about = "" if all(count.is_exact for count in counts) else "about "
    if packs and rows and all(count.num_bytes for count in counts):
        tokens = sum(count.num_bytes for count in counts) / BYTES_PER_TOKEN * trained / rows
        each = min(recipe.max_seq_length, tokens / max(1, trained))
        sequences = math.ceil(trained * each / recipe.max_seq_length)
        why = f"{about}{rows} rows of about {max(1, round(each))} tokens, packed"
        return RunLength(math.ceil(sequences / recipe.rows_per_step) * recipe.num_train_epochs, why, is_packed=True)
    steps = math.ceil(trained / recipe.rows_per_step) * recipe.num_train_epochs
    return RunLength(steps, f"{about}{rows} rows")


def _rows_of(dataset: DatasetConfig, folder: Path) -> RowCount | None:
    """Rows of a source, where its split is known without reading them."""
    match = SLICE.fullmatch(dataset.split.strip())
    if match is None:
        return None
    path = resolve_path(dataset.path, folder)
    if path is None:
        found = cached_hub_rows(dataset.path, dataset.name, match["name"])
    else:
        found = count_rows(path, dataset.txt_rows) if path.is_file() else None
    if found is None or not (match["start"] or match["stop"]):
        return found
    stop = min(found.num_rows, int(match["stop"] or found.num_rows))
    kept = max(0, stop - int(match["start"] or 0))
    return RowCount(kept, round(found.num_bytes * kept / max(1, found.num_rows)), found.is_exact)
