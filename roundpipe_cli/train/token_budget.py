"""The value of `micro_batch_tokens: auto` for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.costs.models import is_counted_exactly
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.model.meta_counts import NotBuiltError, count_on_meta
from roundpipe_cli.planning.question import PlanRequest, ask, ask_again, describe_budget
from roundpipe_cli.recipe.load import LoadedRecipe


def with_token_budget(
    loaded: LoadedRecipe,
    tell: Tell,
    smallest: Callable[[int], int] = lambda tokens: tokens,
    asked: PlanRequest | None = None,
) -> LoadedRecipe:
    """The recipe with `micro_batch_tokens` decided; a full row where `plan` has no figures of the model.

    Args:
        tell: gets the number.
        smallest: of the numbers of all machines of the run.
        asked: see `ask_here`.
    """
    recipe = loaded.recipe
    if recipe.micro_batch_tokens != "auto":
        return loaded
    tokens = None
    with suppress(RefusedError):  # another check reports what is wrong
        tokens = ask_here(loaded, asked).loaded.recipe.token_budget
    recipe = replace(recipe, micro_batch_tokens=smallest(tokens or recipe.tokens_of_full_row))
    tell(Notice(f"{describe_budget(recipe)}, or more shorter ones"))
    return replace(loaded, recipe=recipe)


def ask_here(loaded: LoadedRecipe, asked: PlanRequest | None) -> PlanRequest:
    """The planner's question on this machine, with the model's own count where the tables do not know it.

    Args:
        asked: before torch was there, so without that count; None: there was no answer, or nobody asked.

    Raises:
        RefusedError: see `ask`.
    """
    found = None if asked is None else asked.found
    if asked is None or found is None or (found.is_config and not is_counted_exactly(found.config)):
        return ask(loaded, here=True, build=_count_blocks, found=found)
    return ask_again(asked, loaded)


def _count_blocks(found: FoundConfig) -> Mapping[str, Any] | None:
    """The counts that `plan` takes of a model that the tables do not know."""
    try:
        return count_on_meta(found.config, found.name, found.folder)
    except NotBuiltError:
        return None
