"""Which shipped recipe fits a machine that another recipe does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.costs.models import Architecture, TrainingSettings
from roundpipe_cli.planning.question import PlanRequest, settings_of
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import ShippedRecipe, shipped_recipes


def fitting_recipe(question: PlanRequest) -> ShippedRecipe | None:
    """The shipped recipe that fits the question's machine: of the same model and method if there is one, then of the
    same model, then of the next smaller model of the same family, then of the next smaller one of any."""
    candidates = sorted(_candidates(question.architecture), key=lambda one: _distance(question, one))
    for recipe, architecture, settings in candidates:
        if judge_coarsest(architecture, settings, question.hardware).fits:
            return recipe
    return None


RecipeCandidate = tuple[ShippedRecipe, Architecture, TrainingSettings]


def _candidates(wanted: Architecture) -> Iterator[RecipeCandidate]:
    for shipped in shipped_recipes():
        recipe = load_recipe(shipped.path).recipe
        architecture = shipped_architecture(recipe.model)
        if architecture is not None and architecture.parameters <= wanted.parameters:
            yield shipped, architecture, settings_of(recipe)


def _distance(question: PlanRequest, candidate: RecipeCandidate) -> tuple[bool, bool, int, bool, float]:
    """Distance of a recipe from what was asked, for sorting."""
    recipe, architecture, settings = candidate
    wanted = question.architecture
    other_machine = 0.0
    if recipe.verdict is not None:  # a recipe for about as many GPUs keeps them busy
        other_machine = abs(int(recipe.verdict.hardware.partition("x")[0]) - question.num_workers)
    return (
        architecture.parameters != wanted.parameters,
        architecture.model_type != wanted.model_type,
        -architecture.parameters,
        settings.method != question.settings.method,
        other_machine,
    )
