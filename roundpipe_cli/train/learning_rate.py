"""The learning rate of each update, a pure function of its number, by transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from roundpipe_cli.errors import RefusedError


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
) -> Callable[[int], float]:
    """The learning rate of update k (from 0).

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
