"""Predictions for the stages that a run used, for the comparison at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.cache_size import with_all_weights, with_auto_cache
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.question import PlanRequest, ask_again
from roundpipe_cli.planning.verdict import Verdict, judge
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.schedule.actions import Schedule


def planned_bytes(
    asked: PlanRequest, recipe: Recipe, schedules: Sequence[Schedule], holds_all: bool, longest_row: int
) -> list[dict[str, float]]:
    """Predicted device and host bytes of each schedule; none for devices that `plan` has no figures for.

    Args:
        asked: when the run began.
        recipe: as the run resolved it, without `auto` where that is decided once.
        holds_all: the schedules are for GPUs that hold all weights.
        longest_row: tokens of the longest row that was computed; before the data is read, `max_seq_length` is assumed.
    """
    recipe = replace(recipe, max_seq_length=min(longest_row, recipe.max_seq_length))
    try:
        question = ask_again(asked, replace(asked.loaded, recipe=recipe))
    except RefusedError:
        return []
    if not question.hardware.is_here:
        return []
    whole = with_all_weights(question) if holds_all else None
    return [_needs(whole or question, schedule, is_whole=whole is not None) for schedule in schedules]


def _needs(question: PlanRequest, schedule: Schedule, *, is_whole: bool) -> dict[str, float]:
    """Bytes that `schedule` needs.

    Args:
        is_whole: the question is for devices that hold all weights; any other may have room for a cache.
    """
    verdict = _verdict(question, schedule)
    cached = question if is_whole else with_auto_cache(question, verdict)[0]
    if cached is not question:
        verdict = _verdict(cached, schedule)
    return {"device_peak_bytes": verdict.device.total_bytes, "host_bytes": verdict.host.total_bytes}


def _verdict(question: PlanRequest, schedule: Schedule) -> Verdict:
    cut = StageCut(schedule.forward_stages, schedule.backward_stages, schedule.microbatches_per_round)
    return judge(question.architecture, question.settings, question.hardware, question.analytic, cut)
