"""The count of parameters for `plan` and `bench`, by building the model without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roundpipe_cli.cli.output import say

if TYPE_CHECKING:
    from roundpipe_cli.costs.find_model import FoundConfig


def build_counts(found: FoundConfig) -> Mapping[str, Any] | None:
    """Parameters of each layer, counted on the model itself without its weights; None where that cannot be done.

    Raises:
        RefusedError: `finetune` would refuse the model with these words.
    """
    from roundpipe_cli.model.meta_counts import PROCESSOR_S, NotBuiltError, count_on_meta, is_remembered

    if not is_remembered(found.config):
        kind = found.config.get("model_type")
        what = f"building the model ({kind}) without weights, to count its parameters: loads torch, takes seconds"
        say(f"{what}, at most {PROCESSOR_S:g} of a processor ...")
    try:
        return count_on_meta(found.config, found.name, found.folder)
    except NotBuiltError as error:
        problem = error.problems[0]
        say(f"note: the parameters are not counted on the model: {problem.what} ({problem.found or 'no reason given'})")
        return None
