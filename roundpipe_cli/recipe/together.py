"""Keys that make no sense together, each pair with one problem that names both."""

from __future__ import annotations

from roundpipe_cli.recipe.check import Findings
from roundpipe_cli.recipe.schema import Recipe

NEEDS_EVALUATION = (
    ("eval_steps", None),
    ("eval_samples", 0),
    ("load_best_model_at_end", False),
    ("early_stopping_patience", None),
)
"""(key, off value) of what does nothing without rows to evaluate on."""


def find_contradictions(recipe: Recipe, findings: Findings) -> None:
    """Add a problem for each key that another one makes meaningless."""
    _find_preference_problems(recipe, findings)
    if not recipe.val_set_size and not recipe.eval_datasets:
        for key, off in NEEDS_EVALUATION:
            if getattr(recipe, key) != off:
                findings.add(
                    (key,),
                    f"{key} needs rows to evaluate on",
                    found="neither val_set_size nor eval_datasets",
                    hint="add a line such as `val_set_size: 0.05`",
                )


def _find_preference_problems(recipe: Recipe, findings: Findings) -> None:
    if recipe.objective != "dpo":
        for index, dataset in enumerate(recipe.datasets):
            if dataset.type == "preference":
                path = ("datasets", index, "type")
                findings.add(path, "preference pairs need another objective", hint="add the line `objective: dpo`")
        return
    wanted = (("method", "lora", "the reference is the base model below the adapters"),)
    off = (("packing", False), ("val_set_size", 0.0), ("eval_datasets", ()))
    for key, value, why in wanted:
        if getattr(recipe, key) != value:
            findings.add((key,), f"objective dpo needs {key} {value}", found=str(getattr(recipe, key)), hint=why)
    for key, without in off:
        if getattr(recipe, key) != without:
            findings.add((key,), f"{key} is not offered with objective dpo", hint=f"delete the line {key}")
    for index, dataset in enumerate(recipe.datasets):
        if dataset.type not in ("auto", "preference"):
            path = ("datasets", index, "type")
            findings.add(path, "objective dpo needs preference pairs", found=dataset.type, expected="preference")
