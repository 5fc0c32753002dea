"""Which stages a step gets: the one answer for `plan`, `bench` and a run.

`case_for` states the question for a recipe's pipeline section, `choose` answers it. The answer depends on the case and
the effort alone:

    quick   a recipe, whoever asks: the search looks at a few rounds, deep models get the best of a few even cuts
    full    `bench --costs`: the search looks at the whole step, however deep the model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from roundpipe_cli.choices import SCHEDULE_KINDS, ScheduleName
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.planning.chunk_shapes import chunk_cut
from roundpipe_cli.planning.compare import Keeps, SimulationCase, StageCut, costs_per_microbatch, run_step_s
from roundpipe_cli.planning.cuts import enough_per_round, links_bind, quick_cut, single_cut
from roundpipe_cli.planning.dealing import deal_out, dealt_cut, faster
from roundpipe_cli.planning.partition import LIGHT, plan_partition
from roundpipe_cli.planning.resident import resident_cut
from roundpipe_cli.planning.search.ranges import balanced_stages, even_stages
from roundpipe_cli.planning.search.stages import StageLimits, StageSums, within_limits
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.builders import Options

Effort = Literal["quick", "full"]
MAX_PLANNED_ROUNDS = 4
"""Microbatches per worker in a quick search: later rounds repeat the first ones."""
MAX_SEARCHED_LAYERS = 72
"""With more layers than these a quick choice simulates a few even cuts: the search takes seconds. Bound schedules then
try fewer numbers of stages."""
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
