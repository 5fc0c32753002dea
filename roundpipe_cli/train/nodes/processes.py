"""Whether a recipe can be trained by the processes that the environment tells of. Loads no torch."""

from __future__ import annotations

from roundpipe_cli.costs.machine import Process, require_address, this_process
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.schema import Recipe


def check_processes(recipe: Recipe) -> Process:
    """This process' place among those that train the recipe.

    Raises:
        RefusedError: the environment has impossible values, or the recipe asks for what cannot be shared.
    """
    process = this_process()
    if process.num_local > 1 and recipe.pipeline.devices == "auto":
        raise RefusedError(
            "several processes on one machine would each take all of its devices",
            where="LOCAL_WORLD_SIZE",
            found=f"{process.num_local} processes on this machine, pipeline.devices: auto",
            expected="one process on each machine: it drives all of the machine's devices",
            hint="torchrun --nproc-per-node 1, or roundpipe without torchrun; else name pipeline.devices",
        )
    if process.count > 1:
        _refuse_unshareable(recipe, process.count)
        require_address()
    return process


def _refuse_unshareable(recipe: Recipe, count: int) -> None:
    alone = (
        ("objective", recipe.objective, "sft"),
        ("on_oom", recipe.on_oom, "stop"),
        ("load_best_model_at_end", recipe.load_best_model_at_end, False),
    )
    for key, value, only in alone:
        if value != only:
            raise RefusedError(
                f"{key}: not with several machines", found=str(value).lower(), expected=str(only).lower()
            )
    if recipe.microbatches_per_step < count:
        raise RefusedError(
            "gradient_accumulation_steps: fewer microbatches in a step than machines",
            found=f"{recipe.microbatches_per_step} microbatches, {count} machines",
            expected="at least one for each; several for each of its devices",
        )
