"""One optimizer step of a recipe on a machine, simulated: its time, its bubble, and what moves over the links."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.planning.answers import number
from roundpipe_cli.planning.compare import SimulationCase, StageCut, costs_per_microbatch
from roundpipe_cli.planning.forward import forward_stages
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.schedule.builders import (
    SCORED_PER_WORKER,
    Rounds,
    build_forward,
    build_schedule,
    options_of,
    place_on,
)
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, WEIGHTS, Program, lower
from roundpipe_cli.schedule.simulate import simulate_program, simulated_ends
from roundpipe_cli.schedule.timeline import DOWN, UP, Timeline, chained_step_s

MAX_SIMULATED_MICROBATCHES = 64
"""Steps with more microbatches are extrapolated."""
EXTRAPOLATED_PER_WORKER = 4
"""Microbatches per worker from which a longer step is extrapolated, at least `MAX_SIMULATED_MICROBATCHES / 2` and at
most `MAX_SIMULATED_MICROBATCHES` together. As many are simulated, and two rounds fewer."""


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes over all workers' links in one step."""

    weights_up: int
    boundaries_up: int
    gradients_down: int
    boundaries_down: int

    @property
    def up(self) -> int:
        return self.weights_up + self.boundaries_up


def per_round_of(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches of a round; all of the step for schedules without rounds."""
    usual = 0 if question.loaded.recipe.pipeline.binds_stages else question.num_workers
    return cut.microbatches_per_round or usual or question.settings.num_microbatches


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The figures of one optimizer step."""

    step_s: float
    bubble_ratio: float
    links: LinkBytes


def step_document(step: SimulatedStep) -> dict[str, Any]:
    """A step's figures in JSON's types."""
    return {"step_s": step.step_s, "bubble_ratio": step.bubble_ratio, "links": asdict(step.links)}


def step_from(document: Any) -> SimulatedStep:
    """The inverse of `step_document`.

    Raises:
        ValueError, TypeError, KeyError: not such a document.
    """
    links = {field.name: int(number(document["links"][field.name])) for field in fields(LinkBytes)}
    return SimulatedStep(number(document["step_s"]), number(document["bubble_ratio"]), LinkBytes(**links))


def overlaps_steps(question: PlanRequest) -> bool:
    """Whether steps may overlap: no step waits until all of the step before has ended."""
    on_cpu = all(device.is_cpu for device in question.hardware.devices)
    may = question.loaded.recipe.overlaps_steps(on_cpu=on_cpu)
    return may and question.num_workers > 1 and question.analytic.costs.equal_workers


def simulate_step(question: PlanRequest, cut: StageCut) -> SimulatedStep:
    """One optimizer step. Beyond `MAX_SIMULATED_MICROBATCHES` the time grows by what two more rounds cost."""
    wanted, costs = question.settings.num_microbatches, step_costs(question, cut)
    rounds, full = _rounds(question, cut), _num_simulated(question, cut)
    program = _program(question, cut, full, num_steps=1)
    one = simulated_ends(program, costs)
    busy, step_s, num_bytes = sum(one.busy_s), one.makespan_s, _link_bytes(program)
    if overlaps_steps(question):
        ends = [simulated_ends(_program(question, cut, full, num_steps=n), costs) for n in (2, 4)]
        ends_s = ends[0].makespan_s, ends[1].makespan_s
        step_s = chained_step_s(one.busy_s, ends_s, 2, (1.0,) * question.num_workers)
    if full < wanted:
        shorter, growth = _program(question, cut, full - 2 * rounds, num_steps=1), (wanted - full) / (2 * rounds)
        fewer = simulated_ends(shorter, costs)
        step_s, busy = step_s + growth * (one.makespan_s - fewer.makespan_s), busy * wanted / full
        num_bytes = [
            int(most + growth * (most - less)) for most, less in zip(num_bytes, _link_bytes(shorter), strict=True)
        ]
    bubble = 1 - busy / (question.num_workers * step_s) if step_s else 0.0
    return SimulatedStep(step_s, max(0.0, bubble), LinkBytes(*num_bytes))


def timeline_of_step(question: PlanRequest, cut: StageCut) -> Timeline:
    """The timeline of one step, of at most `MAX_SIMULATED_MICROBATCHES` microbatches."""
    program = _program(question, cut, _num_simulated(question, cut), num_steps=1)
    return simulate_program(program, step_costs(question, cut))


def _rounds(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches after which a step repeats itself: a round's, or with bound stages one for each worker."""
    binds = question.loaded.recipe.pipeline.binds_stages
    return question.num_workers if binds else max(1, per_round_of(question, cut))


def _num_simulated(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches that are simulated: those of the whole step, or fewer by whole rounds."""
    wanted, rounds = question.settings.num_microbatches, _rounds(question, cut)
    if wanted <= MAX_SIMULATED_MICROBATCHES:
        return wanted
    enough = EXTRAPOLATED_PER_WORKER * question.num_workers
    surplus = wanted - min(max(enough, MAX_SIMULATED_MICROBATCHES // 2), MAX_SIMULATED_MICROBATCHES)
    least = 2 * rounds + question.settings.sequence_chunks
    return min(wanted, max(least, wanted - math.ceil(surplus / rounds) * rounds))


def reference_s(question: PlanRequest, cut: StageCut) -> float:
    """Seconds of a step in which the base model looks at its pairs first (`train/preference.py`)."""
    if question.loaded.recipe.objective != "dpo":
        return 0.0
    costs, workers, wanted = step_costs(question, cut), question.num_workers, question.settings.num_microbatches
    covered = max((last for _, last in cut.forward_stages), default=-1)
    own = cut.forward_stages + (cut.backward_stages[:1] if covered < len(costs.layers) - 1 else ())
    once = min(wanted, SCORED_PER_WORKER * workers)
    stages = forward_stages(costs, own, cut.backward_stages, num_workers=workers, num_microbatches=once)
    schedule = build_forward(stages, num_workers=workers, num_microbatches=once)
    forward_s = simulated_ends(lower(schedule, costs), costs).makespan_s
    passes = 3 if question.settings.recompute == "none" else 4  # of a step, of which this is one more
    host_s = once * question.analytic.host_s_per_microbatch / passes
    return (forward_s + host_s) * wanted / once


def shared_costs(question: PlanRequest, cut: StageCut) -> CostModel:
    """Costs of the layers, with what visits take once in the times of their microbatches."""
    case = SimulationCase(question.analytic.costs, question.num_workers, question.settings.num_microbatches)
    return costs_per_microbatch(question.loaded.recipe.pipeline.schedule, case, cut.microbatches_per_round)


def step_costs(question: PlanRequest, cut: StageCut) -> CostModel:
    """Costs of the layers in a step: those in the weight cache upload only what is trained, and what visits take once
    is shared out over their microbatches."""
    settings, costs = question.settings, shared_costs(question, cut)
    if not settings.weight_cache_bytes:
        return costs
    return with_cached_weights(costs, settings.weight_cache_bytes, settings.dtype_bytes)


def _program(question: PlanRequest, cut: StageCut, num_microbatches: int, *, num_steps: int) -> Program:
    """The lowered steps on all workers, also those that the cut leaves idle; to be simulated with `step_costs`."""
    costs, staleness = step_costs(question, cut), question.settings.staleness
    workers = cut.workers or tuple(range(question.num_workers))
    own_speeds = None if costs.worker_speed is None else tuple(costs.worker_speed[worker] for worker in workers)
    pipeline = question.loaded.recipe.pipeline
    options = cut.dealing or options_of(pipeline.head_workers, pipeline.dispatch)
    schedule = build_schedule(
        pipeline.schedule,
        forward_stages=cut.forward_stages,
        backward_stages=cut.backward_stages,
        num_workers=len(workers),
        rounds=Rounds(
            num_microbatches,
            per_round=cut.microbatches_per_round,
            num_steps=num_steps,
            staleness=staleness,
            options=options,
            sequence_chunks=question.settings.sequence_chunks,
        ),
        costs=replace(costs, worker_speed=own_speeds),
    )
    return lower(place_on(schedule, workers, question.num_workers), costs, staleness=staleness)


def _link_bytes(program: Program) -> list[int]:
    """Bytes on the links, in the order of `LinkBytes`."""
    sums = {(lane, weights): 0 for lane in (UP, DOWN) for weights in (True, False)}
    for op in program.ops:
        if op.lane in (UP, DOWN):
            sums[op.lane, op.payload in (WEIGHTS, WEIGHT_GRADIENT)] += op.num_bytes
    return list(sums.values())
