"""The learning rate of each update, a pure function of its number, by transformers' schedules."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from roundpipe_cli.data.batching import BatchSampler
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.units import counted, shown_step

MAX_CHECKED_STEPS = 100_000
"""Every step of a run is checked up to here, in a fraction of a second; of a longer one evenly spaced ones, and those
at the borders of the schedule's phases, within which it only rises, falls, or swings as cosines do."""
ROUNDING = 1e-9
"""Relative excess over the peak that may come from rounding."""

RateSchedule = Callable[[int], float]
"""The learning rate of update k (from 0)."""


def num_steps_of(recipe: Recipe, sampler: BatchSampler) -> int:
    """Updates of the whole run."""
    return recipe.max_steps or sampler.num_steps(recipe.num_train_epochs)


def rate_schedule_of(recipe: Recipe, num_steps: int) -> RateSchedule:
    """The learning rate of update k (from 0) of a run of `num_steps` updates, by transformers' schedule.

    Raises:
        RefusedError: the schedule does not take the recipe's settings, or a step's learning rate is not finite,
            negative, or above the peak without `lr_above_peak`.
    """
    from transformers import get_scheduler

    name, peak = recipe.lr_scheduler_type, recipe.learning_rate
    settings = {str(key): value for key, value in recipe.lr_scheduler_kwargs.items()}
    warmup = num_warmup_steps(recipe.warmup_steps, num_steps)
    kind = "constant_with_warmup" if name == "constant" else name
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    what = f"{settings} for {num_steps} steps, {warmup} of them warmup"
    step: int | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that num_stable_steps is used where it is given
            scheduler = get_scheduler(
                kind,
                optimizer,
                num_warmup_steps=warmup,
                num_training_steps=num_steps,
                scheduler_specific_kwargs=dict(settings),
            )
        factor = scheduler.lr_lambdas[0]
        for step in _steps_to_check(num_steps, warmup, settings):
            rate = peak * float(factor(step))
            if not math.isfinite(rate) or rate < 0 or (rate > peak * (1 + ROUNDING) and not recipe.lr_above_peak):
                is_above = math.isfinite(rate) and rate > peak
                raise RefusedError(
                    f"the schedule {name} gives a learning rate that is out of bounds",
                    where="lr_scheduler_kwargs",
                    found=f"{rate:g} at step {shown_step(step)}, by {what}",
                    expected=f"a number from 0 to learning_rate, {peak:g}, at every step",
                    hint="lr_above_peak: true, if it is meant to exceed it" if is_above else None,
                )
    except (ValueError, TypeError, ArithmeticError) as error:
        at = "" if step is None else f" at step {shown_step(step)}"
        raise RefusedError(
            f"the schedule {name} does not take these settings",
            where="lr_scheduler_kwargs",
            found=f"{what}: {error}{at}",
        ) from error
    return lambda step: peak * float(factor(step))


def num_warmup_steps(warmup_steps: float, num_steps: int) -> int:
    """Updates of warmup: `warmup_steps` itself, or that fraction (below 1) of all updates, rounded up."""
    if isinstance(warmup_steps, int) or warmup_steps >= 1:
        return int(warmup_steps)
    return -int(-warmup_steps * num_steps // 1)


def _steps_to_check(num_steps: int, warmup: int, settings: Mapping[Any, Any]) -> Iterable[int]:
    if num_steps <= MAX_CHECKED_STEPS:
        return range(num_steps)
    stable, decay = (int(settings.get(key, 0)) for key in ("num_stable_steps", "num_decay_steps"))
    borders = (0, warmup, warmup + stable, warmup + stable + decay, num_steps - decay, num_steps)
    around = {border + offset for border in borders for offset in (-1, 0, 1)}
    spread = range(0, num_steps, -(-num_steps // MAX_CHECKED_STEPS))
    return sorted({step for step in around if 0 <= step < num_steps}.union(spread))


def describe_schedule(schedule: RateSchedule, recipe: Recipe, num_steps: int) -> list[str]:
    """Warnings about a schedule, a line each: a peak that is not reached, steps that train nothing."""
    warmup = num_warmup_steps(recipe.warmup_steps, num_steps)
    rates = {step: schedule(step) for step in _steps_to_check(num_steps, warmup, recipe.lr_scheduler_kwargs)}
    highest, lines = max(rates.values()), []
    if highest < recipe.learning_rate * (1 - ROUNDING):
        lines.append(
            f"the learning rate is {highest:.3g} at most and never reaches {recipe.learning_rate:g} in this run of "
            f"{counted(num_steps, 'step')}, {warmup} of them warmup"
        )
    last = next((step for step in reversed(rates) if rates[step] > 0), None)
    if last is not None and last + 2 < num_steps:
        lines.append(
            f"the learning rate is 0 from step {shown_step(last + 1)} to the end, step {num_steps}: they train nothing"
        )
    return lines


def describe_change(
    old: RateSchedule, new: RateSchedule, *, step: int, old_steps: int, num_steps: int, same_rows: bool = True
) -> str:
    """One line for the user: how another number of steps changes a run that continues after `step` updates.

    The rate of an update is that of its number, in a run of as many steps as it now has.

    Args:
        same_rows: steps have as many rows as those that are done.
    """
    text = f"the run has {num_steps} steps instead of {old_steps}"
    now, before = f"step {shown_step(step)} has {new(step):.4g}", f"step {step} had {old(step - 1):.4g}"
    if all(old(k) == new(k) for k in range(step)):
        return f"{text}: so far the learning rate is that of a run of {num_steps} steps; {before}, {now}"
    text = f"{text}: the learning rate follows the schedule of {num_steps} steps from here on; {before}, {now}"
    if not same_rows:
        return text
    return (
        f"{text}. A run of {num_steps} steps from the start would have had other rates up to here; its rows come in "
        "the same order"
    )
