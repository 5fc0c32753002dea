"""The schedules of `roundpipe bench RECIPE`, with the stages and the weight cache that `roundpipe plan` shows."""

from __future__ import annotations

from roundpipe_cli.choices import CHUNK_SCHEDULES, SCHEDULES
from roundpipe_cli.cli.built_model import build_counts
from roundpipe_cli.cli.output import say
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.predict import cards_worth_using
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.run_plan import contenders
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import schedule_name
from roundpipe_cli.watchdog import watching


def request_of(recipe: str, overrides: list[str], hardware: str | None) -> PlanRequest:
    """The question that `plan` answers for this recipe, for the devices that it uses.

    Raises:
        RefusedError: the recipe, its model or the hardware.
    """
    loaded = load_recipe(recipe, overrides)
    with watching(loaded.recipe.watchdog_s):
        question = ask(loaded, hardware, build=build_counts)
        used = cards_worth_using(question, Answers())
    if used.num_workers < question.num_workers:
        say(f"note: as in `plan`, on {used.num_workers} of {question.num_workers} GPUs")
    return used


def as_planned(
    request: PlanRequest, schedules: list[str] | None, answers: Answers
) -> list[tuple[str, StageCut, SimulationCase]]:
    """Each schedule with its stages and the case to simulate; all schedules where none is named.

    Raises:
        RefusedError: a schedule, or the recipe with it.
    """
    recipe = request.loaded.recipe
    known = SCHEDULES if recipe.pipeline.num_chunks == 1 else CHUNK_SCHEDULES
    names = list(dict.fromkeys(schedule_name(name) for name in schedules or known))
    with watching(recipe.watchdog_s):
        found = contenders(request, names, answers)
    for one in found:
        if one.reasons:
            say(f"note: {one.name} does not fit: {one.reasons[0]}")
    return [(one.name, one.cut, one.case) for one in found]
