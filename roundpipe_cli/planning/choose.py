"""Which stages a step gets: the one answer for `plan`, `bench` and a run.

`case_for` states the question for a recipe's pipeline section, `choose` answers it. The answer depends on the case and
the effort alone:

    quick   a recipe, whoever asks: the search looks at a few rounds, deep models get the best of a few even cuts
    full    `bench --costs`: the search looks at the whole step, however deep the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from roundpipe_cli.choices import SCHEDULE_KINDS, ScheduleName
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.memory import largest_stage_bytes
from roundpipe_cli.planning.chunk_shapes import chunk_shapes
from roundpipe_cli.planning.compare import (
    SimulationCase,
    StageCut,
    costs_per_microbatch,
    make_schedule,
    run_step_s,
)
from roundpipe_cli.planning.cuts import enough_per_round, links_bind, quick_cut, single_cut
from roundpipe_cli.planning.partition import LIGHT, plan_partition
from roundpipe_cli.planning.resident import resident_cut
from roundpipe_cli.planning.search.ranges import backward_ranges, balanced_stages, even_cut, even_sizes, even_stages
from roundpipe_cli.planning.search.stages import StageLimits, StageSums, within_limits
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import Ends, simulated_ends

Effort = Literal["quick", "full"]
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
"""Such a dealing may take at most this part of the host memory's rate for all links together."""
MAX_PLANNED_ROUNDS = 4
"""Microbatches per worker in a quick search: later rounds repeat the first ones."""
MAX_SEARCHED_LAYERS = 72
"""With more layers than these a quick choice simulates a few even cuts: the search takes seconds. Bound schedules then
try fewer numbers of stages."""
NUM_SIMULATED = 4
"""So many of the shapes of a step in chunks that are fastest without transfers are simulated with transfers."""
MAX_WEIGHED_MICROBATCHES = 64
"""Microbatches in the simulations that compare cuts with rounds of different lengths."""


def case_for(
    pipeline: PipelineConfig,
    costs: CostModel,
    counts: tuple[int, int],
    limits: StageLimits | None,
    *,
    weights_stay: bool = False,
) -> SimulationCase:
    """The question that a recipe's pipeline section asks.

    Args:
        counts: workers, and microbatches of a step (chunks of sequences, where sequences are cut).
        limits: of stages and rounds on the machine.
        weights_stay: see `SimulationCase`.
    """
    return SimulationCase(
        costs,
        *counts,
        options=dealing_options(pipeline),
        auto_dealing=pipeline.dispatch == "auto",
        auto_head=pipeline.head_workers == "auto",
        sequence_chunks=pipeline.num_chunks,
        limits=limits,
        weights_stay=weights_stay,
    )


def dealing_options(pipeline: PipelineConfig) -> Options:
    """How the recipe has stages dealt out; `auto` is the published way until the workers' speeds are known."""
    head_workers = 1 if pipeline.head_workers == "auto" else pipeline.head_workers
    return Options(head_workers, earliest_free=pipeline.dispatch == "earliest_free")


def given_cut(pipeline: PipelineConfig, num_workers: int) -> StageCut | None:
    """The stages that the recipe gives; None where it leaves them to the planner."""
    if pipeline.forward_stages == "auto":
        return None
    stages, chunks = _ranges(pipeline.forward_stages), pipeline.num_chunks
    if pipeline.binds_stages:
        return StageCut(stages, tuple(reversed(stages)))
    return StageCut(stages, _ranges(pipeline.backward_stages), -(-num_workers // chunks) * chunks)


def in_long_rounds(cut: StageCut, case: SimulationCase) -> StageCut:
    """The cut in as few equal rounds as the host has room for: uploads, fill and drain come once a round."""
    if cut.microbatches_per_round is None:
        return cut
    total, chunks, limit = case.num_microbatches, case.sequence_chunks, case.limits
    longest = limit.microbatches_per_round if limit is not None else None
    most = total if longest is None else min(total, max(cut.microbatches_per_round, longest))
    num_rounds = -(-total // (most // chunks * chunks))
    return replace(cut, microbatches_per_round=-(-total // (chunks * num_rounds)) * chunks)


def _ranges(stages: Sequence[Sequence[int]] | str) -> tuple[StageRange, ...]:
    assert not isinstance(stages, str)
    return tuple((int(first), int(last)) for first, last in stages)


def choose(name: ScheduleName, case: SimulationCase, keeps: Keeps | None = None, effort: Effort = "full") -> StageCut:
    """The stages of one step.

    Args:
        name: of the schedule. Bound schedules get the fastest of even and balanced stages, roundpipe the planner's.
        keeps: further limits; None: the case's own alone.

    Raises:
        ResourceError: roundpipe, and no cut keeps the case's limits.
    """
    allowed = _allowed(case, keeps)
    unshared, limits, case = case, case.limits, replace(case, costs=costs_per_microbatch(name, case))
    if SCHEDULE_KINDS[name].binds_stages:
        return _bound_cut(name, case, allowed, effort)
    if case.sequence_chunks > 1:
        return chunk_cut(case, allowed)
    needs_no_search = case.num_workers == 1 and limits is not None and effort == "quick" and len(case.costs.layers) > 2
    planned = (single_cut(unshared, allowed) if needs_no_search else None) or _planned(case, effort)
    if case.options != Options():
        # The planner knows the published dispatch only; for another one even stages may be better than its own.
        return dealt_cut(planned, case, allowed)
    chosen = deal_out(planned, unshared, allowed)
    whole = resident_cut(case.costs, case.num_workers, allowed) if case.weights_stay else None
    return chosen if whole is None else faster(chosen, whole, case)


def _allowed(case: SimulationCase, keeps: Keeps | None) -> Keeps:
    sums = StageSums(case.costs)

    def allowed(cut: StageCut) -> bool:
        stages = cut.forward_stages, cut.backward_stages
        within = within_limits(sums, case.limits, *stages, cut.microbatches_per_round or case.num_workers)
        return within and (keeps is None or keeps(cut))

    return allowed


def _planned(case: SimulationCase, effort: Effort) -> StageCut:
    """The planner's stages for the published dispatch."""
    few_rounds = min(case.num_microbatches, MAX_PLANNED_ROUNDS * case.num_workers)
    limits = case.limits
    if limits is not None and effort == "quick" and len(case.costs.layers) > MAX_SEARCHED_LAYERS:
        why = "the best of a few even cuts: with so many layers evenness hardly matters"
        return replace(quick_cut(case), explanation=(why,))
    if effort == "full":
        searched = plan_partition(case)
    else:
        light = LIGHT if case.accounting == "default" else None
        searched = plan_partition(replace(case, num_microbatches=few_rounds), light)
    if limits is None:
        return searched
    counts, per_round = (case.num_workers, case.num_microbatches), searched.microbatches_per_round or case.num_workers
    is_long = enough_per_round(case.costs, *counts, limits) <= per_round
    if is_long and not links_bind(case.costs, case.num_microbatches, per_round):
        return searched
    # The search looks at a few rounds only, and less at uploads: where links bind, longer rounds and even stages may be
    # worth more than a better cut.
    short = replace(case, num_microbatches=min(case.num_microbatches, MAX_WEIGHED_MICROBATCHES))
    return min(searched, quick_cut(case), key=lambda cut: run_step_s("roundpipe", cut, short))


def _bound_cut(name: ScheduleName, case: SimulationCase, allowed: Keeps, effort: Effort) -> StageCut:
    """The fastest of even and balanced stages that keep the limits; the fastest of all where none does."""
    if effort == "quick":
        most = MAX_PLANNED_ROUNDS * case.num_workers * case.sequence_chunks
        case = replace(case, num_microbatches=min(case.num_microbatches, most))
    num_layers, num_workers, kind = len(case.costs.layers), case.num_workers, SCHEDULE_KINDS[name]
    max_loops = 1 if kind.one_stage_each else -(-num_layers // num_workers)
    per_round = num_workers if kind.keeps_few else case.num_microbatches
    published = replace(case, accounting="published", staleness=0, num_steps=1)
    drafts: list[tuple[bool, float, int, StageCut]] = []
    is_deep = effort == "quick" and num_layers > MAX_SEARCHED_LAYERS
    for loops in _loops(num_layers, num_workers, max_loops) if is_deep else range(1, max_loops + 1):
        num_stages = loops * num_workers
        candidates = {balanced_stages(case.costs, num_stages), even_stages(num_layers, num_stages)}
        cuts = [StageCut(stages, tuple(reversed(stages))) for stages in sorted(candidates)]
        least_s, best = min(((run_step_s(name, cut, published), cut) for cut in cuts), key=lambda one: one[0])
        breaks = not allowed(replace(best, microbatches_per_round=per_round))
        drafts.append((breaks, least_s, loops, best))
    drafts.sort(key=lambda one: one[:3])
    scored: list[tuple[bool, float, int, StageCut]] = []
    for breaks, least_s, loops, cut in drafts:  # transfers only add to the published time
        if scored and (breaks, least_s) > min(scored, key=lambda one: one[:3])[:2]:
            break
        scored.append((breaks, run_step_s(name, cut, replace(case, num_steps=1)), loops, cut))
    return min(scored, key=lambda one: one[:3])[3]


def _loops(num_layers: int, num_workers: int, most: int) -> list[int]:
    """Stages per worker to try of deep models: the fewest for each size of the largest stage.

    Sizes are counted with the embedding as a layer and without.
    """
    fewest = {}
    for loops in range(most, 0, -1):
        stages = loops * num_workers
        fewest[-(-(num_layers - 1) // stages), -(-(num_layers - 2) // stages)] = loops
    return sorted(fewest.values())


Keeps = Callable[[StageCut], bool]
"""Whether stages keep limits that are not in the case, such as the host's memory."""


def chunk_cut(case: SimulationCase, keeps: Keeps | None = None) -> StageCut:
    """Stages of roundpipe where sequences come in chunks, and the head's workers if the case leaves them open."""
    narrow = _chunk_cut(case, keeps)
    spread = _head_spread(case)
    if spread is None:
        return narrow
    wide = replace(_chunk_cut(replace(case, options=spread), keeps), dealing=spread)
    return faster(narrow, wide, case)


def _head_spread(case: SimulationCase) -> Options | None:
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


def _chunk_cut(case: SimulationCase, keeps: Keeps | None) -> StageCut:
    """The fastest by simulation of the first few shapes that keep their limits; if none does, that of least memory."""
    shapes = chunk_shapes(case)
    kept = list(filter(keeps, shapes))[:NUM_SIMULATED]
    if not kept:
        return max(
            shapes,
            key=lambda cut: (len(cut.backward_stages), len(cut.forward_stages), -(cut.microbatches_per_round or 0)),
        )
    one_step = replace(case, num_steps=1)
    return min(kept, key=lambda cut: run_step_s("roundpipe", cut, one_step))


def deal_out(planned: StageCut, case: SimulationCase, keeps: Keeps | None = None) -> StageCut:
    """The planner's stages in turn, or where a simulated step is faster so: if workers differ in speed, earliest-free
    dispatch with stages that suit it; if they are equal, stages that several share. Not under published accounting.

    The planner leaves out workers that would only hold the others up, so no choice is slower than without them.
    """
    may_split = not any(layer.whole_bytes for layer in case.costs.layers)
    case = replace(case, costs=costs_per_microbatch("roundpipe", case), may_split=may_split)
    spread = _head_spread(case)
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
    if not (allowed or is_whole):  # of a longer step the end, where sharing stages helps, is a small part
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
    """The same stages, held by several workers at a time: earliest-free, and with the last ones of a step shared.

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
        found = [
            replace(cut, microbatches_per_round=per_round, dealing=dealing, explanation=(*cut.explanation, dealing.why))
            for dealing in ((free, shared) if up_s <= MAX_HOST_SHARE * ends.makespan_s else (shared,))
        ]
        if keeps is None or keeps(found[0]):
            yield from found
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
