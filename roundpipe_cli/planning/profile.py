"""Measured costs: each layer timed forward, recompute and backward on this machine, with all workers busy, and how much
slower a worker is than the fastest.

A profile is an ordinary training step whose stages hold one layer each, so nothing is computed for nothing, and what
the engine adds per action (boundaries, gradient folds) is in the times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.schedule.timeline import Timeline

MIN_DIFFERENCE = 0.1
"""A worker counts as slower if it takes longer than the fastest by at least this share."""
SAME_SPEED = 0.05
"""Slower workers whose speeds differ by less than this share get the same speed."""
MIN_SAMPLES = 4
"""With fewer times of a worker than this its speed is unknown."""
MIN_SHARE = 0.1
"""Times shorter than this share of the longest are left out: they show overheads, not the device."""


def profile_stages(num_layers: int) -> tuple[tuple[StageRange, ...], tuple[StageRange, ...]]:
    """Forward and backward stages of one layer each; the embedding goes with block 0."""
    head = num_layers - 1
    first: StageRange = (0, 1)
    single = [(layer, layer) for layer in range(2, head)]
    return (first, *single), ((head, head), *reversed(single), first)


def profile_schedule(num_layers: int, num_workers: int, num_microbatches: int, sequence_chunks: int = 1) -> Schedule:
    """A step in which every layer can be timed by itself."""
    forward, backward = profile_stages(num_layers)
    return build_schedule(
        "roundpipe",
        forward_stages=forward,
        backward_stages=backward,
        num_workers=num_workers,
        rounds=Rounds(num_microbatches, sequence_chunks=sequence_chunks),
    )


def measured_costs(base: CostModel, steps: Iterable[Timeline]) -> CostModel:
    """`base` with the times of profile steps in place of its own.

    Layers of one kind (equal costs in `base`) get one time. Each microbatch counts by its median over these layers,
    which leaves out what disturbed a few of them; of microbatches of different lengths the mean tells how long a step
    takes. The head's time is its whole backward action, because the engine runs its forward there under every schedule.
    Times are those of a worker of speed 1, by the speeds of `base`.
    """
    seconds: dict[tuple[int, Kind], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    group_of = _groups(base)
    for step in steps:
        for item in step.intervals:
            layer = _layer(item.kind, item.stage, len(base.layers))
            speed = 1.0 if base.worker_speed is None else base.worker_speed[item.worker]
            taken_s = (item.end_s - item.start_s) * speed
            seconds[group_of[layer], item.kind][item.microbatch].append(taken_s)
    layers = list(base.layers)
    for first in sorted(set(group_of.values())):
        members = [index for index, group in group_of.items() if group == first]
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


def measured_speeds(base: CostModel, steps: Sequence[Timeline], num_workers: int) -> tuple[float, ...] | None:
    """Each worker's speed relative to the fastest; None where profile steps show no difference.

    A worker is slower if it takes `MIN_DIFFERENCE` more for the same layers and microbatch in every one of the steps,
    and three quarters of its times are above three quarters of the fastest one's: noise does neither.
    """
    found = [_slowness(base, [step], num_workers) for step in steps]
    pooled = _slowness(base, steps, num_workers)
    if pooled is None or any(one is None for one in found):
        return None
    slower = set.intersection(*(_slower(one) for one in found if one is not None), _slower(pooled))
    if not slower:
        return None
    best = min(spread[1] for spread in pooled)
    speeds = [best / spread[1] if worker in slower else 1.0 for worker, spread in enumerate(pooled)]
    group: list[int] = []
    for worker in [*sorted(slower, key=lambda worker: speeds[worker]), -1]:
        if group and (worker < 0 or speeds[worker] > speeds[group[0]] * (1 + SAME_SPEED)):
            same = statistics.median(speeds[member] for member in group)
            for member in group:
                speeds[member] = same
            group = []
        group.append(worker)
    return tuple(speeds)


_Spread = tuple[float, float, float]
"""Lower quartile, median and upper quartile of a worker's times, as parts of what all workers take for the same."""


def _slower(spreads: Sequence[_Spread]) -> set[int]:
    """Workers that are clearly slower than the fastest worker."""
    fastest = min(spreads, key=lambda spread: spread[1])
    return {
        worker
        for worker, (low, middle, _) in enumerate(spreads)
        if middle > fastest[1] * (1 + MIN_DIFFERENCE) and low > fastest[2]
    }


def _slowness(base: CostModel, steps: Sequence[Timeline], num_workers: int) -> list[_Spread] | None:
    """Each worker's spread over what all workers have timed: layers of one kind and the same microbatch."""
    group_of = _groups(base)
    times: dict[tuple[int, Kind, int], list[list[float]]] = defaultdict(lambda: [[] for _ in range(num_workers)])
    for step in steps:
        for item in step.intervals:
            group = group_of[_layer(item.kind, item.stage, len(base.layers))]
            times[group, item.kind, item.microbatch][item.worker].append(item.end_s - item.start_s)
    shared = [rows for rows in times.values() if all(rows)]
    usual_s = [statistics.fmean(statistics.median(row) for row in rows) for rows in shared]
    least_s = MIN_SHARE * max(usual_s, default=0.0)
    ratios: list[list[float]] = [[] for _ in range(num_workers)]
    for rows, together_s in zip(shared, usual_s, strict=True):
        for own, row in zip(ratios, rows, strict=True):
            own += [seconds / together_s for seconds in row if together_s > least_s]
    if min(len(own) for own in ratios) < MIN_SAMPLES:
        return None
    quartiles = [statistics.quantiles(own, n=4, method="inclusive") for own in ratios]
    return [(low, middle, high) for low, middle, high in quartiles]


def _groups(base: CostModel) -> dict[int, int]:
    """Layer -> the first layer of its kind: those of equal costs."""
    first_of: dict[LayerCost, int] = {}
    return {index: first_of.setdefault(replace(layer, name=""), index) for index, layer in enumerate(base.layers)}


def _mean_of_medians(seconds: Mapping[int, list[float]]) -> float | None:
    """Mean of the microbatches' medians; None if nothing was timed."""
    return statistics.fmean(statistics.median(times) for times in seconds.values()) if seconds else None


def _layer(kind: Kind, stage: int, num_layers: int) -> int:
    """The layer of a profile stage."""
    return stage + 1 if kind is Kind.FORWARD else num_layers - 1 - stage
