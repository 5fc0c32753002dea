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
    if not recipe.val_set_size and not recipe.eval_datasets:
        for key, off in NEEDS_EVALUATION:
            if getattr(recipe, key) != off:
                findings.add(
                    (key,),
                    f"{key} needs rows to evaluate on",
                    found="neither val_set_size nor eval_datasets",
                    hint="add a line such as `val_set_size: 0.05`",
                )
