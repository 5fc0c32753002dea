"""Predictions for the stages that a run used, for the comparison at its end."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.cache_size import with_all_weights, with_auto_cache
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.verdict import Verdict, judge
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.schedule.actions import Schedule


def planned_bytes(
    loaded: LoadedRecipe, recipe: Recipe, schedule: Schedule, holds_all: bool, longest_row: int
) -> dict[str, float]:
    """Predicted device and host bytes; empty for a model or devices that `plan` has no figures for.

    Args:
        recipe: as the run resolved it, without `auto` where that is decided once.
        holds_all: the schedule is for GPUs that hold all weights.
        longest_row: tokens of the longest row that was computed; before the data is read, `max_seq_length` is assumed.
    """
    recipe = replace(recipe, max_seq_length=min(longest_row, recipe.max_seq_length))
    try:
        question = ask(replace(loaded, recipe=recipe), here=True)
    except RefusedError:
        return {}
    if not question.hardware.is_here:
        return {}

    def verdict_on(question: PlanRequest) -> Verdict:
        cut = StageCut(schedule.forward_stages, schedule.backward_stages, schedule.microbatches_per_round)
        return judge(question.architecture, question.settings, question.hardware, question.analytic, cut)

    whole = with_all_weights(question) if holds_all else None
    verdict = verdict_on(whole or with_auto_cache(question, verdict_on(question))[0])
    return {"device_peak_bytes": verdict.device.total_bytes, "host_bytes": verdict.host.total_bytes}
