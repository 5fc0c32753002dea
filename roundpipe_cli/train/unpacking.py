"""How a run unpacks packed weights: as `plan` says for this machine."""

from __future__ import annotations

from contextlib import suppress

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.planning.auto_choices import Unpacking
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.train.token_budget import ask_here


def decide_unpacking(
    loaded: LoadedRecipe, packed_as: PackedName | None, tell: Tell, asked: PlanRequest | None = None
) -> bool:
    """Whether packed weights are unpacked once per visit of a stage; else for each microbatch and pass.

    Args:
        packed_as: how the base's weights lie.
        tell: gets a line about it, where any are packed.
        asked: see `ask_here`.
    """
    if packed_as is None:
        return False
    found = None
    with suppress(RefusedError):  # another check reports what is wrong
        found = ask_here(loaded, asked).unpacking
    unpacking = found or Unpacking(PACKED_FORMATS[packed_as].label, once=False, lacking="figures of this model")
    tell(Notice(unpacking.describe()))
    return unpacking.once
