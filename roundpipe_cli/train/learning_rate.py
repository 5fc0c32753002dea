"""The learning rate of each update, a pure function of its number, by transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from roundpipe_cli.errors import RefusedError

Schedule = Callable[[int], float]
"""The learning rate of update k (from 0)."""


def num_warmup_steps(warmup_steps: float, num_steps: int) -> int:
    """Updates of warmup: `warmup_steps` itself, or that fraction (below 1) of all updates, rounded up."""
    if isinstance(warmup_steps, int) or warmup_steps >= 1:
        return int(warmup_steps)
    return -int(-warmup_steps * num_steps // 1)


def make_schedule(
    name: str,
    *,
    peak: float,
    warmup_steps: float,
    num_steps: int,
    settings: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule of a run.

    Args:
        name: of transformers' schedule; `constant` is the one with warmup.
        peak: learning rate after warmup.
        warmup_steps: a number, or a fraction below 1 of `num_steps`.
        num_steps: updates of the whole run.
        settings: of the schedule, by transformers' names.

    Raises:
        RefusedError: the schedule does not take these settings.
    """
    from transformers import get_scheduler

    warmup = num_warmup_steps(warmup_steps, num_steps)
    kind = "constant_with_warmup" if name == "constant" else name
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    try:
        scheduler = get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(settings or {}),
        )
        factor = scheduler.lr_lambdas[0]
        factor(num_steps)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise RefusedError(
            f"the schedule {name} does not take these settings",
            where="lr_scheduler_kwargs",
            found=f"{dict(settings or {})} for {num_steps} steps, {warmup} of them warmup: {error}",
        ) from error
    return lambda step: peak * float(factor(step))


def describe_change(old: Schedule, new: Schedule, *, step: int, old_steps: int, num_steps: int) -> str:
    """What another number of steps does to a run that continues after `step` updates: one line for the user."""
    text = f"the run has {num_steps} steps instead of {old_steps}"
    now, before = f"step {step + 1} has {new(step):.4g}", f"step {step} had {old(step - 1):.4g}"
    if all(old(k) == new(k) for k in range(step)):
        return f"{text}: so far the learning rate is that of a run of {num_steps} steps; {before}, {now}"
    return (
        f"{text}: the learning rate follows the schedule of {num_steps} steps from here on; {before}, {now}. A run of "
        f"{num_steps} steps from the start would have had other rates up to here; its rows come in the same order"
    )
