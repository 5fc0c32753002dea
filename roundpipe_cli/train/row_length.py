"""`max_seq_length: auto` for a plan: the longest row by estimate, where files and a tokenizer say it. No torch."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.data.lengths import longest_row, token_counter
from roundpipe_cli.data.settings import spec_of
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import LENGTH_KEY


def with_estimated_length(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with `max_seq_length: auto` decided; as it is where it says a number, or rows cannot be read here."""
    recipe, tokens = loaded.recipe, 1
    if recipe.max_seq_length != "auto":
        return loaded
    found = find_config(recipe.model, resolve_path(recipe.model, loaded.folder), recipe.revision)
    counter = token_counter(found.folder, found.config.get("chat_template"))
    for entry in (*recipe.datasets, *recipe.eval_datasets):
        longest = longest_row(spec_of(entry, recipe.objective_kind.example), loaded.folder, counter)
        if longest is None:
            return loaded
        tokens = max(tokens, longest)
    note = f"{LENGTH_KEY}={tokens} (auto): about the longest row; `roundpipe data` counts its tokens"
    return replace(loaded, recipe=replace(recipe, max_seq_length=tokens), length_note=note)
