"""The shipped recipe that fits a machine which another recipe does not fit."""

from __future__ import annotations

from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU
from roundpipe_cli.planning.question import PlanRequest, settings_of
from roundpipe_cli.planning.solve import Change, changed, fits_coarsest
from roundpipe_cli.recipe.check import contradictions
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import shipped_recipes


def fitting_recipe(question: PlanRequest, remedy: Change | None = None) -> tuple[str, ...] | None:
    """The words after `roundpipe plan` for the shipped recipe whose weights this machine's memory holds: of the same
    model if there is one, otherwise of the next smaller one. None also where it is the question's own.

    Args:
        remedy: tried where no recipe of a model fits as it is.
    """
    candidates = []
    for shipped in shipped_recipes():
        loaded = load_recipe(shipped.path)
        architecture = shipped_architecture(loaded.recipe.model)
        most = question.architecture.parameters
        if not question.gpus:
            most = min(most, MAX_PARAMETERS_ON_CPU)
        if architecture is None or architecture.parameters > most:
            continue
        overrides = [text for text in (remedy.overrides if remedy is not None else ()) if not text.startswith("model=")]
        needed = tuple(text for text in overrides if changed(loaded, (text,)) != loaded)
        other_machine = 0  # a recipe for about as many GPUs keeps them busy
        if shipped.verdict is not None:
            other_machine = abs(int(shipped.verdict.hardware.partition("x")[0]) - question.num_workers)
        for words in dict.fromkeys([(), needed]):
            other_method = loaded.recipe.method != question.settings.method
            is_longer = loaded.recipe.row_tokens > max(4096, question.loaded.recipe.row_tokens)
            distance = -architecture.parameters, is_longer, words != (), other_method, other_machine
            candidates.append((distance, shipped, changed(loaded, words), words, architecture))
    for _, shipped, loaded, words, architecture in sorted(candidates, key=lambda one: one[0]):
        if contradictions(loaded.recipe):
            continue
        settings = settings_of(loaded.recipe, architecture)
        if fits_coarsest(architecture, settings, question.hardware):
            is_own = shipped.path.resolve() == question.loaded.path.resolve()
            asked = question.given.recipe
            is_known = is_own and (words or settings == settings_of(asked, architecture))
            return None if is_known else (shipped.command_name, *words)
    return None
