"""The schedules that `bench` compares on a recipe, each with the stages and costs that `plan` has for it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.choices import SCHEDULE_KINDS, ScheduleName
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.predict import decide, stage_case
from roundpipe_cli.planning.question import PlanRequest, ask_again
from roundpipe_cli.planning.unequal import with_cards_of
from roundpipe_cli.recipe.schema import Recipe


@dataclass(frozen=True)
class Contender:
    """A schedule as `plan` sees the recipe with it."""

    name: ScheduleName
    cut: StageCut
    case: SimulationCase
    """To be simulated; the costs know the weights that stay on GPUs."""
    reasons: tuple[str, ...]
    """Reasons why the recipe does not fit with it; empty: it fits."""


def contenders(own: PlanRequest, names: Sequence[ScheduleName], answers: Answers | None) -> list[Contender]:
    """A contender for each schedule, all with the same microbatches; errors as of `make_plan`.

    Args:
        own: the recipe as it stands, on the devices to use.
        answers: as of `make_plan`.
    """
    least_bytes = min(device.memory_bytes for device in own.hardware.devices)

    def question(name: ScheduleName) -> PlanRequest:
        if name == own.loaded.recipe.pipeline.schedule:
            return own
        loaded = replace(own.loaded, recipe=with_schedule(own.loaded.recipe, name))
        return with_cards_of(ask_again(own, loaded), least_bytes)

    return [_contender(asked, name, answers) for name, asked in [(name, question(name)) for name in names]]


def _contender(question: PlanRequest, name: ScheduleName, answers: Answers | None) -> Contender:
    question, cut, verdict, _, _ = decide(question, answers)
    settings, costs = question.settings, question.analytic.costs
    if settings.weight_cache_bytes:
        costs = with_cached_weights(costs, settings.weight_cache_bytes, settings.dtype_bytes)
    case = replace(stage_case(question), costs=costs, staleness=1 if settings.staleness else 0)
    return Contender(name, cut, case, verdict.short_reasons)


def with_schedule(recipe: Recipe, name: ScheduleName) -> Recipe:
    """The recipe with another schedule; stages that it gives, and dealings that the schedule lacks, are left out."""
    pipeline = recipe.pipeline
    if name == pipeline.schedule:
        return recipe
    pipeline = replace(pipeline, schedule=name, forward_stages="auto", backward_stages="auto")
    if SCHEDULE_KINDS[name].binds_stages:
        pipeline = replace(pipeline, head_workers="auto", dispatch="auto")
    return replace(recipe, pipeline=pipeline)
