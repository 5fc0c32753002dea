"""The learning rate of each update, a pure function of its number, by transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable

import torch


def num_warmup_steps(warmup_steps: float, num_steps: int) -> int:
    """Updates of warmup: `warmup_steps` itself, or that fraction (below 1) of all updates, rounded up."""
    if isinstance(warmup_steps, int) or warmup_steps >= 1:
        return int(warmup_steps)
    return -int(-warmup_steps * num_steps // 1)


def make_schedule(name: str, *, peak: float, warmup_steps: float, num_steps: int) -> Callable[[int], float]:
    """The learning rate of update k (from 0).

    Args:
        name: `cosine`, `linear` or `constant`.
        peak: learning rate after warmup.
        warmup_steps: a number, or a fraction below 1 of `num_steps`.
        num_steps: updates of the whole run.
    """
    from transformers import get_scheduler

    warmup = num_warmup_steps(warmup_steps, num_steps)
    kind = "constant_with_warmup" if name == "constant" else name
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)
    factor = scheduler.lr_lambdas[0]
    return lambda step: peak * float(factor(step))
