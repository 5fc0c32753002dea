"""The settings of learning-rate schedules, and their values that keep the learning rate in bounds.

No schedule may give a learning rate that is negative, or above `learning_rate` unless `lr_above_peak` asks for it. The
bounds here do not depend on the number of steps; `train/optim/learning_rate.py` looks at every step before training.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from roundpipe_cli.recipe.check import REFUSED, Findings, check
from roundpipe_cli.recipe.constraints import Range
from roundpipe_cli.recipe.schema import Recipe

SCHEDULE_KEYS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""Settings of each schedule in transformers."""
NEEDED_SCHEDULE_KEYS = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps",)}
"""Exactly one of these is required."""

_NOT_NEGATIVE, _COUNT = Annotated[float, Range(0)], Annotated[int, Range(0)]
_CURVE = Literal["linear", "cosine", "1-sqrt"]
KINDS: dict[str, Any] = {
    **dict.fromkeys(("num_cycles", "lr_end", "power", "min_lr", "min_lr_rate", "min_lr_ratio"), _NOT_NEGATIVE),
    "timescale": Annotated[float, Range(0, above=True)],
    **{"num_decay_steps": _COUNT, "num_stable_steps": _COUNT, "warmup_type": _CURVE, "decay_type": _CURVE},
}
"""Values of each setting for which no step has a negative learning rate. A negative power has no bound above."""
DEFAULT_LR_END = 1e-7
"""transformers' `lr_end` of the polynomial schedule."""


def find_schedule_problems(recipe: Recipe, findings: Findings) -> None:
    """Add a problem for each setting that the schedule does not take, that it lacks, or that leads out of bounds."""
    name, given = recipe.lr_scheduler_type, recipe.lr_scheduler_kwargs
    good: dict[str, Any] = {}
    for key, value in given.items():
        path = ("lr_scheduler_kwargs", key)
        if key not in SCHEDULE_KEYS.get(name, ()):
            known = ", ".join(SCHEDULE_KEYS.get(name, ())) or "no settings"
            findings.add(path, f"the schedule {name} has no setting {key}", expected=known)
        elif (checked := check(value, KINDS[key], path, findings)) is not REFUSED:
            good[key] = checked
    needed = NEEDED_SCHEDULE_KEYS.get(name, ())
    if needed and sum(key in given for key in needed) != 1:
        findings.add(
            ("lr_scheduler_kwargs",),
            f"the schedule {name} needs {' or '.join(needed)}",
            hint=f"add a line such as `lr_scheduler_kwargs: {{{needed[-1]}: {0.1 if len(needed) > 1 else 100}}}`",
        )
    _find_above_peak(recipe, good, findings)


def _find_above_peak(recipe: Recipe, given: dict[str, Any], findings: Findings) -> None:
    peak = recipe.learning_rate
    for key, most in {"min_lr": peak, "min_lr_rate": 1.0, "min_lr_ratio": 1.0}.items():
        if given.get(key, 0.0) > most and not recipe.lr_above_peak:
            findings.add(
                ("lr_scheduler_kwargs", key),
                "the learning rate would rise above its peak",
                found=f"{key}: {given[key]:g}, which is {given[key] * peak / most:g} at the end of the schedule",
                expected=f"at most {most:g}: learning_rate is {peak:g}",
                hint="lr_above_peak: true, if it is meant to",
            )
    if recipe.lr_scheduler_type == "polynomial" and given.get("lr_end", DEFAULT_LR_END) >= peak:
        findings.add(
            ("lr_scheduler_kwargs", "lr_end") if "lr_end" in given else ("lr_scheduler_kwargs",),
            "the polynomial schedule has to fall",
            found=f"lr_end: {given.get('lr_end', DEFAULT_LR_END):g}",
            expected=f"below learning_rate, which is {peak:g}",
        )
