"""Dealing of stages: in turn as published, or to the earliest free worker or shared where that is simulated faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.memory import largest_stage_bytes
from roundpipe_cli.planning.compare import (
    Keeps,
    SimulationCase,
    StageCut,
    costs_per_microbatch,
    make_schedule,
    run_step_s,
)
from roundpipe_cli.planning.search.ranges import backward_ranges, even_cut, even_sizes
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import Ends, simulated_ends

MAX_JUDGED_ROUNDS = 4
"""Microbatches per worker in the simulations that judge even stages and a head on all workers."""
MAX_JUDGED_STEPS = 4
"""Chained steps in the simulations that judge even stages."""
MAX_JUDGED_LAYERS = 72
"""With more layers than these only one even cut is judged: each takes seconds."""
NUM_FINALISTS = 3
"""The best partitions by the short simulation; these are judged again by a whole step."""
MIN_GAIN = 0.005
"""A dealing other than the published one is chosen if it saves more than this part of a step."""
MIN_DEALING_GAIN = 0.02
"""Stages that several workers hold at a time are chosen if they save at least this part of a step."""
MAX_HOST_SHARE = 0.6
"""Stages that several workers hold may take at most this part of the host memory's rate for all links together."""


def head_spread(case: SimulationCase) -> Options | None:
    """The head's microbatches on all workers, if that may be chosen. A trained head's gradients then go to the host for
    each microbatch, and wait there for their turn to be added: only where the host's part is known and has room."""
    costs, head = case.costs, case.costs.layers[-1]
    is_frozen = not (head.grad_bytes or head.optimizer_s)
    room = case.limits.waiting_bytes if case.limits is not None else None
    fits = room is None or case.num_workers * head.grad_bytes <= room
    may_wait = is_frozen or (costs.host_bytes_per_s is not None and case.sequence_chunks == 1 and fits)
    is_open = case.auto_head and _leaves_open(case) and case.staleness == 0
    may = is_open and costs.has_updates and costs.equal_workers and case.num_workers > 1 and may_wait
    return Options(head_workers=case.num_workers) if may else None


def _leaves_open(case: SimulationCase) -> bool:
    """Whether the planner may deal stages in another way than the published one."""
    return case.options == Options() and case.accounting == "default"


def deal_out(planned: StageCut, case: SimulationCase, keeps: Keeps | None = None) -> StageCut:
    """The planner's stages in turn, or where a simulated step is faster so: if workers differ in speed, earliest-free
    dispatch with stages that suit it; if they are equal, stages that several share. Not under published accounting.

    The planner leaves out workers that would only hold the others up, so no choice is slower than without them.
    """
    may_split = not any(layer.whole_bytes for layer in case.costs.layers)
    case = replace(case, costs=costs_per_microbatch("roundpipe", case), may_split=may_split)
    spread = head_spread(case)
    if spread is not None:
        return _shared_out(planned, spread, case, keeps)
    if case.costs.equal_workers or not (case.auto_dealing and _leaves_open(case)):
        return planned
    free = Options(earliest_free=True)
    dealt = dealt_cut(planned, replace(case, options=free), keeps)
    dealt = replace(dealt, dealing=free, explanation=(free.why,))
    return faster(planned, dealt, replace(case, num_steps=min(case.num_steps, MAX_JUDGED_STEPS)))


def _shared_out(planned: StageCut, spread: Options, case: SimulationCase, keeps: Keeps | None) -> StageCut:
    """The planner's stages in turn or, where a simulated step is faster so, with stages that several workers share.

    Args:
        spread: the head on all workers.
    """
    longest = max(2 * case.num_workers, planned.microbatches_per_round or 0)
    rounds = sorted({min(case.num_microbatches, size) for size in (2 * case.num_workers, longest)})
    fine = [
        StageCut(*stages, per_round, dealing=spread, explanation=(spread.why,))
        for stages in _fine_stages(case)
        for per_round in rounds
    ]
    finest, coarser = fine[: len(rounds)], fine[len(rounds) :]
    allowed = list(filter(keeps, finest)) or list(filter(keeps, coarser))
    short = replace(case, num_microbatches=min(case.num_microbatches, MAX_JUDGED_ROUNDS * case.num_workers))
    is_whole = short.num_microbatches == case.num_microbatches
    # Of a longer step the end, where sharing stages helps, is a small part; and shared, stages take no less memory.
    if not (allowed or (is_whole and (keeps is None or keeps(planned)))):
        return planned
    best, ends = planned, _step_ends(planned, short)
    if allowed:
        other, cut = min(((_step_ends(cut, short), cut) for cut in allowed), key=lambda one: one[0].makespan_s)
        if other.makespan_s < ends.makespan_s * (1 - MIN_GAIN):
            best, ends = cut, other
    least_s = ends.makespan_s * (1 - MIN_DEALING_GAIN)
    for cut in _splits(best, ends, short, keeps) if is_whole else ():
        if sum(ends.busy_s) / case.num_workers > least_s:
            break
        other = _step_ends(cut, short)
        if other.makespan_s < least_s and other.links_s <= MAX_HOST_SHARE * other.makespan_s:
            best, least_s = cut, other.makespan_s
    return best


def _fine_stages(case: SimulationCase) -> Iterator[tuple[tuple[StageRange, ...], tuple[StageRange, ...]]]:
    """One block a stage: of all cuts tried, what suits a head that costs each worker little. Beside a trained head,
    whose gradients take host memory, coarser backward stages too, which leave more of it."""
    num_layers, workers = len(case.costs.layers), case.num_workers
    forward, single = even_cut(num_layers, 1, 1)
    yield forward, single
    if case.costs.layers[-1].grad_bytes:
        for count in (3 * workers, 5 * workers // 2, 2 * workers):
            if count < len(single) - 1:
                sizes = even_sizes(num_layers - 2, count, larger_first=True)
                few = sizes.count(sizes[-1]) // 2  # half of the smaller stages first: workers wait at both ends
                sizes = (*sizes[count - few :], *sizes[: count - few])
                yield forward, backward_ranges([1, *sizes[:-1], sizes[-1] + 1], num_layers)


def _splits(cut: StageCut, ends: Ends, case: SimulationCase, keeps: Keeps | None) -> Iterator[StageCut]:
    """The cut's stages, held by several workers at a time: earliest-free, and with the last ones of a step shared.

    Only where blocks are frozen: gradients of trained ones would go to the host for every microbatch. And not where a
    visit unpacks weights once, which each of the workers would do.
    """
    costs, workers = case.costs, case.num_workers
    if not (case.may_split and case.auto_dealing and costs.has_frozen_blocks and costs.host_bytes_per_s):
        return
    usual = cut.microbatches_per_round or workers
    for per_round in (case.num_microbatches, usual):  # a round as long as the step sends every stage least often
        num_rounds = -(-case.num_microbatches // per_round)
        stages = cut.forward_stages + cut.backward_stages
        sent = sum(layer.param_bytes for first, last in stages for layer in costs.layers[first : last + 1])
        up_s = workers * num_rounds * sent / costs.host_bytes_per_s
        free, shared = Options(earliest_free=True), Options(shared_stages=workers if num_rounds == 1 else len(stages))
        cuts = [
            replace(cut, microbatches_per_round=per_round, dealing=dealing, explanation=(*cut.explanation, dealing.why))
            for dealing in ((free, shared) if up_s <= MAX_HOST_SHARE * ends.makespan_s else (shared,))
        ]
        if keeps is None or keeps(cuts[0]):
            yield from cuts
            return


def _step_ends(cut: StageCut, case: SimulationCase) -> Ends:
    costs = costs_per_microbatch("roundpipe", case, cut)
    schedule = make_schedule("roundpipe", cut, replace(case, costs=costs))
    return simulated_ends(lower(schedule, costs, after_update=True), costs)


def faster(planned: StageCut, other: StageCut, case: SimulationCase) -> StageCut:
    """`other` if it is faster by more than the simulator's error, else `planned`."""
    planned_s, other_s = (run_step_s("roundpipe", partition, case) for partition in (planned, other))
    return other if other_s < planned_s * (1 - MIN_GAIN) else planned


def dealt_cut(planned: StageCut, case: SimulationCase, keeps: Keeps | None = None) -> StageCut:
    """The fastest of the planner's stages and a few even ones, under the case's `options`.

    Judged by at most four microbatches a worker and four chained steps, so that long steps take no longer to judge, and
    the best of those by all.
    """
    num_free = int(case.costs.layers[0].name == "embed")
    workers, blocks = case.num_workers, len(case.costs.layers) - 1 - num_free
    num_microbatches = min(case.num_microbatches, MAX_JUDGED_ROUNDS * workers)
    short = replace(case, num_microbatches=num_microbatches, num_steps=min(case.num_steps, MAX_JUDGED_STEPS))
    rounds = sorted({min(size, num_microbatches) for size in (workers, 2 * workers, 4 * workers)})
    whole_step = replace(case, num_steps=short.num_steps)
    counts = sorted({max(1, min(count, blocks)) for count in (workers, 2 * workers, blocks)})
    if blocks > MAX_JUDGED_LAYERS:
        counts = [min(2 * workers, blocks)]
    candidates = [
        StageCut(*even_cut(blocks + 1 + num_free, *sizes, num_free=num_free), per_round)
        for sizes in product([-(-blocks // count) for count in counts], repeat=2)
        for per_round in (rounds[:1] if case.accounting == "published" else rounds)
    ]
    planned_s = run_step_s("roundpipe", planned, short)
    timed = [(run_step_s("roundpipe", one, short), one) for one in filter(keeps, candidates) if _fits(one, case)]
    faster_ones = sorted((one for one in timed if one[0] < planned_s * (1 - 1e-9)), key=lambda one: one[0])
    finalists = [planned, *(candidate for _, candidate in faster_ones[:NUM_FINALISTS])]
    if case.options.earliest_free:  # where all layers fit, whole microbatches without any recompute
        whole = _whole_model(case.costs, case.num_microbatches)
        finalists += filter(keeps, [] if whole is None else [whole])
    return min(finalists, key=lambda partition: run_step_s("roundpipe", partition, whole_step))


def _fits(cut: StageCut, case: SimulationCase) -> bool:
    """Whether a device holds the stages, by the rule of the search, where a costs file alone gives its memory."""
    costs, layers, most = case.costs, case.costs.layers, case.costs.device_memory_bytes
    if most is None or case.limits is not None or case.accounting == "published":
        return True
    slot_bytes = largest_stage_bytes(layers, cut.forward_stages, cut.backward_stages)
    kept = max(sum(layer.visit_bytes for layer in layers[first : last + 1]) for first, last in cut.backward_stages)
    return costs.slots * slot_bytes + kept + 4 * max(layer.boundary_bytes for layer in layers) <= most


def _whole_model(costs: CostModel, num_microbatches: int) -> StageCut | None:
    """All layers in the stage with the head, except an embedding, whose rows come from the host; None where not every
    slot of a device could hold them all, with the activations of one microbatch."""
    layers, limit, last = costs.layers, costs.device_memory_bytes, len(costs.layers) - 1
    held = costs.slots * sum(layer.param_bytes + layer.grad_bytes for layer in layers)
    if limit is not None and held + sum(layer.visit_bytes for layer in layers) > limit:
        return None
    if layers[0].name != "embed" or not last:
        return StageCut((), ((0, last),), num_microbatches)
    return StageCut(((0, 0),), ((1, last), (0, 0)), num_microbatches)
