"""`max_seq_length: auto` for a plan: the longest row by estimate, where files and a tokenizer say it. No torch."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.data.lengths import longest_row, token_counter
from roundpipe_cli.data.settings import spec_of
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import LENGTH_KEY


def with_estimated_length(loaded: LoadedRecipe, found: FoundConfig) -> LoadedRecipe:
    """The recipe with `max_seq_length: auto` decided; with a line that says what stands for it where that is not known.

    Args:
        found: the model's configuration, beside which its tokenizer may lie.
    """
    recipe = loaded.recipe
    if recipe.max_seq_length != "auto" or loaded.length_note is not None:
        return loaded
    counter, tokens = token_counter(found.folder, found.config.get("chat_template")), 1
    for entry in (*recipe.datasets, *recipe.eval_datasets):
        longest = longest_row(spec_of(entry, recipe.objective_kind.example), loaded.folder, counter)
        if longest is None:
            why = f"assumed for auto: the rows of {entry.path} cannot be read here, `finetune` takes their longest"
            return replace(loaded, length_note=f"{LENGTH_KEY}={recipe.row_tokens}: {why}")
        tokens = max(tokens, longest)
    note = f"{LENGTH_KEY}={tokens} (auto): about the longest row; `roundpipe data` counts its tokens"
    return replace(loaded, recipe=replace(recipe, max_seq_length=tokens), length_note=note)
