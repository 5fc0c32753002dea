"""Where a run's stages are cut: as the recipe says, or by the planner, from times measured now or remembered.

The planner wants to know what each layer costs. A run measures that itself: its first steps have one layer a stage
and are timed, the steps after are cut by what they showed, and the next run on the same machine knows it from the
start. Where stages are cut changes no bit of the result.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundpipe_cli.cache import Remembered
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.costs.memory import DEVICE_SHARE, beyond_margin
from roundpipe_cli.planning.choose import case_for, choose, dealing_options, given_cut, in_long_rounds
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule
from roundpipe_cli.planning.predict import MEASURED
from roundpipe_cli.planning.search.stages import StageLimits, limits_for
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.schedule.simulate import simulate, simulated_step_s
from roundpipe_cli.schedule.timeline import Timeline, bubble_ratio, makespan_s

# Measured costs: each layer timed forward, recompute and backward on this machine, with all workers busy, and how much
# slower a worker is than the fastest.
#
# A profile is an ordinary training step whose stages hold one layer each, so nothing is computed for nothing, and what
# the engine adds per action (boundaries, gradient folds) is in the times.

MIN_DIFFERENCE = 0.1
"""A worker counts as slower if it takes longer than the fastest by at least this share."""
SAME_SPEED = 0.05
"""Slower workers whose speeds differ by less than this share get the same speed."""
MIN_SAMPLES = 4
"""With fewer times of a worker than this its speed is unknown."""
MIN_SHARE = 0.1
"""Times shorter than this share of the longest are left out: they show overheads, not the device."""


def profile_schedule(num_layers: int, num_workers: int, num_microbatches: int, sequence_chunks: int = 1) -> Schedule:
    """A step in which every layer can be timed by itself: stages of one layer each, the embedding with block 0."""
    head, first = num_layers - 1, (0, 1)
    single = [(layer, layer) for layer in range(2, head)]
    return build_schedule(
        "roundpipe",
        forward_stages=(first, *single),
        backward_stages=((head, head), *reversed(single), first),
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
            seconds[group_of[layer], item.kind][item.microbatch].append((item.end_s - item.start_s) * speed)
    layers = list(base.layers)
    for first in sorted(set(group_of.values())):
        members = [index for index, group in group_of.items() if group == first]
        forward_s, recompute_s, backward_s = (
            statistics.fmean(map(statistics.median, by_microbatch.values())) if by_microbatch else None
            for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
            for by_microbatch in [seconds[first, kind]]
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


def _layer(kind: Kind, stage: int, num_layers: int) -> int:
    return stage + 1 if kind is Kind.FORWARD else num_layers - 1 - stage


# Measured layer times, remembered by hardware and model, so that the next run plans its stages at once.
#
# A file per key, seconds: {"layers": [[forward, recompute, backward], ...], "worker_speed": null or [1.0, ...]}.
# What cannot be read or written, or is not as it was written, is measured again.

FORMAT = 3
"""Version of the files; raised when the times get another meaning."""


class ProfileCache:
    """The times of one model on one set of devices."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        """
        Args:
            key: everything that layer times depend on, in JSON's types.
        """
        self._kept = Remembered("profiles", json.dumps([FORMAT, key], sort_keys=True))
        self.path = self._kept.path

    @property
    def damage(self) -> str | None:
        """Message about a file that `load` could not use."""
        text = f"the remembered times in {self.path} cannot be used and are measured again: {self._kept.damage}"
        return text if self._kept.damage else None

    def load(self, base: CostModel) -> CostModel | None:
        """`base` with the remembered times in place of its own; None if there are none, or `damage` says why not."""
        found = self._kept.load()
        if found is None:
            return None
        layers = tuple(
            replace(layer, forward_s=forward_s, recompute_s=recompute_s, backward_s=backward_s)
            for layer, (forward_s, recompute_s, backward_s) in zip(base.layers, found["layers"], strict=True)
        )
        speeds = None if found["worker_speed"] is None else tuple(found["worker_speed"])
        return replace(base, name=f"{base.name}, measured by an earlier run", layers=layers, worker_speed=speeds)

    def save(self, costs: CostModel) -> None:
        """Remember measured times; a cache that cannot be written is no error."""
        rows = [[layer.forward_s, layer.recompute_s, layer.backward_s] for layer in costs.layers]
        self._kept.save({"layers": rows, "worker_speed": costs.worker_speed})


PROFILE_STEPS = 2
"""Profile steps. The first is slower (kernels are chosen, buffers made), so it counts only if there is no second."""
CONFIRM_STEPS = 2
"""Further profile steps where workers seem to differ in speed: a difference counts only if all steps show it."""
MAX_OFF = 1.3
"""Steps that differ from an earlier run's times by more than this factor are measured again."""
MAX_SEARCHES = 4
"""Numbers of microbatches for which stages are searched; a step of another number takes the nearest one's."""


class AdaptivePlanner:
    """Builds the schedule of each step; the last step of an epoch may have fewer microbatches."""

    def __init__(
        self,
        costs: CostModel,
        num_workers: int,
        pipeline: PipelineConfig,
        cache: ProfileCache | None = None,
        *,
        weights_stay: bool = False,
        shared_bytes: int = 0,
        microbatches_per_round: int | None = None,
        waiting_bytes: int | None = None,
        head_gradient_bytes: int = 0,
    ) -> None:
        """
        Args:
            costs: of the layers, rough.
            num_workers: devices.
            pipeline: the recipe's section.
            cache: of what an earlier run has measured.
            weights_stay: every worker can read all weights, so a microbatch may stay on one worker.
            shared_bytes: of a device's memory, needed whatever the stages are.
            microbatches_per_round: at most; None: no limit.
            waiting_bytes: see `StageLimits`.
            head_gradient_bytes: see `limits_for`.
        """
        self.costs = self.rough = costs
        self._weights_stay = weights_stay
        limits, memory_bytes = StageLimits(microbatches_per_round=microbatches_per_round), costs.device_memory_bytes
        if memory_bytes is not None:
            free = int(DEVICE_SHARE * memory_bytes) - shared_bytes
            head = beyond_margin(head_gradient_bytes, memory_bytes)
            limits = limits_for(costs, free, microbatches_per_round, head_gradient_bytes=head)
        self._limits = replace(limits, waiting_bytes=waiting_bytes)
        self._cache = cache
        self._num_workers = num_workers
        self._pipeline = pipeline
        self._schedules: dict[int, Schedule] = {}
        self._cuts: dict[int, StageCut] = {}
        """Stages found by search with the present costs, by number of microbatches of a step."""
        self._profile: list[Timeline] = []
        """Steps since the stages last changed."""
        self._kept: StageCut | None = None
        """Stages that stay the same, however many microbatches a step has."""
        self._kept_costs = costs
        self._given = given_cut(pipeline, num_workers)
        self._options = dealing_options(pipeline)
        self._chunks = pipeline.num_chunks
        self._planned = self._given is None
        known = cache.load(costs) if cache is not None and self._planned else None
        self.notice = cache.damage if cache is not None else None
        """Note for the user on the remembered times."""
        self._doubted = known is not None
        """Whether the times are an earlier run's, not yet confirmed by steps of this run."""
        self.costs = known or costs
        self.measured = known is not None or not self._planned
        """Whether `costs` are final; until then every step is a profile step."""

    def schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of the next step, which cuts each of its microbatches into the recipe's chunks."""
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = self._build(num_microbatches * self._chunks)
        return self._schedules[num_microbatches]

    def expected(self, num_microbatches: int) -> Schedule:
        """The schedule of a step after the profile, by the costs known so far."""
        if self.measured:
            return self.schedule(num_microbatches)
        case = self.case(num_microbatches * self._chunks)
        return make_schedule(self._pipeline.schedule, choose(self._pipeline.schedule, case, effort="quick"), case)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The most recent schedules of full and short steps."""
        return tuple(self._schedules.values())

    def predicted(self, num_microbatches: int) -> dict[str, float] | None:
        """The simulator's figures of a full step by the measured costs; None before they are measured."""
        if not (self.measured and self._planned):
            return None
        costs = self.costs if self._kept is None else self._kept_costs
        timeline = simulate(self.schedule(num_microbatches), costs, after_update=True)
        step_s = makespan_s(timeline)
        least_s, most_s = MEASURED.around(step_s)
        bubble = bubble_ratio(timeline)
        return {"step_s": step_s, "least_step_s": least_s, "most_step_s": most_s, "bubble_ratio": bubble}

    def keep_stages(self, schedule: Schedule, costs: CostModel | None = None, options: Options | None = None) -> None:
        """Keep to the stages of `schedule` from now on: the memory beside them will be filled.

        Args:
            costs: of the layers from now on; None: as they were.
            options: how stages are dealt out from now on; None: as they were.
        """
        dealing = options or self._options
        self._kept = StageCut(schedule.forward_stages, schedule.backward_stages, dealing=dealing)
        self._kept_costs = costs or self.costs
        self._schedules = {schedule.num_microbatches // self._chunks: schedule}

    def leave_out(self, lost: Collection[int]) -> None:
        """Cut the stages for fewer workers from now on, by what is known of the others: `lost` are gone."""

        def for_the_rest(costs: CostModel) -> CostModel:
            speeds = costs.worker_speed
            if speeds is not None:
                speeds = tuple(speed for worker, speed in enumerate(speeds) if worker not in lost)
            return replace(costs, worker_speed=speeds)

        self._num_workers -= len(lost)
        self.costs, self.rough = for_the_rest(self.costs), for_the_rest(self.rough)
        self._kept_costs = for_the_rest(self._kept_costs)
        if self._given is not None and self._pipeline.binds_stages:  # as many as there were workers
            self._pipeline = replace(self._pipeline, forward_stages="auto")
            self.measured, self._planned = False, True
        self._given = given_cut(self._pipeline, self._num_workers)
        self._cache = None  # it is of all devices
        self._profile.clear()
        self._forget_schedules()

    def become(self, other: AdaptivePlanner) -> None:
        """Plan as `other` from now on, which was made for other microbatches, with the workers that are left here."""
        if gone := range(self._num_workers, other._num_workers):
            other.leave_out(gone)
        vars(self).update(vars(other))

    def release_stages(self) -> None:
        """Go back to the stages that the planner chooses for devices that keep no weights."""
        self._kept = None
        self._schedules.clear()

    @property
    def is_settled(self) -> bool:
        """Whether stages will stay as they are."""
        return self.measured and not self._doubted

    def observe(self, step: Timeline) -> None:
        """Learn from the measured times of a finished step."""
        if self.is_settled:
            return
        self._profile.append(step)
        if self._doubted and len(self._profile) > PROFILE_STEPS:
            self._doubted = False
            if not self._borne_out(self._profile[1:]):
                self.costs, self.measured = self.rough, False
                self._forget_schedules()
            self._profile.clear()
        elif not self.measured and len(self._profile) >= PROFILE_STEPS:
            steps = self._profile[PROFILE_STEPS - 1 :]
            speeds = measured_speeds(self.rough, steps, self._num_workers) if self._num_workers > 1 else None
            if speeds is not None and len(steps) <= CONFIRM_STEPS:
                return
            self.costs = measured_costs(replace(self.rough, worker_speed=speeds), steps)
            self.measured = True
            if self._cache is not None:
                self._cache.save(self.costs)
            self._forget_schedules()
            self._profile.clear()

    def _borne_out(self, steps: Sequence[Timeline]) -> bool:
        """Whether steps took about as long as the times of an earlier run predict."""
        for step in steps:
            num_microbatches = (1 + max(interval.microbatch for interval in step.intervals)) // self._chunks
            predicted_s = simulated_step_s(self.schedule(num_microbatches), self.costs)
            if predicted_s and 1 / MAX_OFF <= makespan_s(step) / predicted_s <= MAX_OFF:
                return True
        return False

    def _build(self, num_microbatches: int) -> Schedule:
        if not self.measured:
            return profile_schedule(len(self.costs.layers), self._num_workers, num_microbatches, self._chunks)
        name = self._pipeline.schedule
        if self._kept is not None:
            return make_schedule(name, self._kept, self.case(num_microbatches, costs=self._kept_costs))
        case = self.case(num_microbatches)
        given = None if self._given is None else in_long_rounds(self._given, case)
        return make_schedule(name, given or self._searched(num_microbatches, case), case)

    def _searched(self, num_microbatches: int, case: SimulationCase) -> StageCut:
        """Stages for a step of so many microbatches. Microbatches that are filled by tokens come in many numbers."""
        if num_microbatches not in self._cuts:
            if len(self._cuts) >= MAX_SEARCHES:
                return self._cuts[min(self._cuts, key=lambda count: abs(count - num_microbatches))]
            self._cuts[num_microbatches] = choose(self._pipeline.schedule, case, effort="quick")
        return self._cuts[num_microbatches]

    def _forget_schedules(self) -> None:
        self._schedules.clear()
        self._cuts.clear()

    def case(self, num_microbatches: int, *, costs: CostModel | None = None) -> SimulationCase:
        """The question to `choose` for a step of so many microbatches or chunks.

        Args:
            costs: of the layers; None: as far as they are known.
        """
        counts, stay = (self._num_workers, num_microbatches), self._weights_stay and self._num_workers > 1
        return case_for(self._pipeline, costs or self.costs, counts, self._limits, weights_stay=stay)
