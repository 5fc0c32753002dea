"""How long a run will be, as far as its recipe and the files that it names say."""

from __future__ import annotations

import math

from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path

MAX_COUNTED_BYTES = 256 * 1024**2
"""Lines of a larger file are counted up to here and scaled."""


def steps_of(loaded: LoadedRecipe) -> tuple[int | None, str]:
    """Optimizer steps of the whole run and how that is known; None where the rows cannot be counted here."""
    recipe = loaded.recipe
    if recipe.max_steps is not None:
        return recipe.max_steps, "max_steps"
    rows = 0
    for dataset in recipe.datasets:
        path = resolve_path(dataset.path, loaded.folder)
        if path is None or not path.is_file() or path.suffix != ".jsonl" or "[" in dataset.split:
            return None, f"{dataset.path} is no local .jsonl file to count"
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(MAX_COUNTED_BYTES)
        lines = head.count(b"\n") + (len(head) == size and not head.endswith(b"\n"))
        rows += round(lines * size / len(head)) if head else 0
    return math.ceil(rows / recipe.rows_per_step) * recipe.num_train_epochs, f"{rows} rows"
