"""Measured costs: each layer timed forward, recompute and backward on this machine, with all workers busy.

A profile is an ordinary training step whose stages hold one layer each, so nothing is computed for nothing, and what
the engine adds per action (boundaries, gradient folds) is in the times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from roundpipe_cli.engine.engine import StepResult
from roundpipe_cli.plan.cost import CostModel
from roundpipe_cli.schedule.actions import Kind, Schedule, StageRange
from roundpipe_cli.schedule.builders import build_schedule


def profile_stages(num_layers: int) -> tuple[tuple[StageRange, ...], tuple[StageRange, ...]]:
    """Forward and backward stages of one layer each; the embedding goes with block 0."""
    head = num_layers - 1
    first: StageRange = (0, 1)
    single = [(layer, layer) for layer in range(2, head)]
    return (first, *single), ((head, head), *reversed(single), first)


def profile_schedule(num_layers: int, num_workers: int, num_microbatches: int) -> Schedule:
    """A step in which every layer can be timed by itself."""
    forward, backward = profile_stages(num_layers)
    return build_schedule(
        "roundpipe",
        forward_stages=forward,
        backward_stages=backward,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
    )


def measured_costs(base: CostModel, results: Iterable[StepResult]) -> CostModel:
    """`base` with the times of profile steps in place of its own.

    Layers of one kind (equal costs in `base`) get one median over all of them. The head's time is its whole backward
    action, because the engine runs its forward there under every schedule.
    """
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for result in results:
        for item in result.actions:
            layer = _layer(item.action.kind, item.action.stage, len(base.layers))
            seconds[layer, item.action.kind].append(item.end_s - item.start_s)
    groups: dict[object, list[int]] = defaultdict(list)
    for index, layer_cost in enumerate(base.layers):
        groups[replace(layer_cost, name="")].append(index)
    layers = list(base.layers)
    for members in groups.values():
        times = {
            kind: [value for index in members for value in seconds[index, kind]]
            for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
        }
        forward = times[Kind.FORWARD] + times[Kind.RECOMPUTE]
        for index in members:
            layers[index] = replace(
                layers[index],
                forward_s=statistics.median(forward) if forward else 0.0,
                backward_s=statistics.median(times[Kind.BACKWARD]) if times[Kind.BACKWARD] else 0.0,
            )
    return replace(base, name=f"{base.name}, measured", layers=tuple(layers))


def _layer(kind: Kind, stage: int, num_layers: int) -> int:
    """The layer of a profile stage."""
    return stage + 1 if kind is Kind.FORWARD else num_layers - 1 - stage
