"""Measured costs: each layer timed forward, recompute and backward on this machine, with all workers busy.

A profile is an ordinary training step whose stages hold one layer each, so nothing is computed for nothing, and what
the engine adds per action (boundaries, gradient folds) is in the times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
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

    Layers of one kind (equal costs in `base`) get one time. Each microbatch counts by its median over these layers,
    which leaves out what disturbed a few of them; of microbatches of different lengths the mean tells how long a step
    takes. The head's time is its whole backward action, because the engine runs its forward there under every schedule.
    """
    seconds: dict[tuple[int, Kind], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[object, list[int]] = defaultdict(list)
    for index, layer_cost in enumerate(base.layers):
        groups[replace(layer_cost, name="")].append(index)
    group_of = {index: members[0] for members in groups.values() for index in members}
    for result in results:
        for item in result.actions:
            layer = _layer(item.action.kind, item.action.stage, len(base.layers))
            seconds[group_of[layer], item.action.kind][item.action.microbatch].append(item.end_s - item.start_s)
    layers = list(base.layers)
    for first, members in ((members[0], members) for members in groups.values()):
        forward_s, recompute_s, backward_s = (
            _mean_of_medians(seconds[first, kind]) for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
        )
        for index in members:
            layers[index] = replace(
                layers[index],
                forward_s=forward_s or 0.0,
                backward_s=backward_s or 0.0,
                recompute_s=recompute_s if layers[index].recompute else None,
            )
    return replace(base, name=f"{base.name}, measured", layers=tuple(layers))


def _mean_of_medians(seconds: Mapping[int, list[float]]) -> float | None:
    """Of each microbatch's median; None if nothing was timed."""
    return statistics.fmean(statistics.median(times) for times in seconds.values()) if seconds else None


def _layer(kind: Kind, stage: int, num_layers: int) -> int:
    """The layer of a profile stage."""
    return stage + 1 if kind is Kind.FORWARD else num_layers - 1 - stage
