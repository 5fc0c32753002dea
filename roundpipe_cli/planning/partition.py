"""The planner's choice: how to cut the layers into forward and backward stages so that a step takes least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from roundpipe_cli.errors import ResourceError
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.search.batch import INFEASIBLE, BatchScorer, RoundChain, chain_of, one_batch, worker_speeds
from roundpipe_cli.planning.search.ranges import backward_ranges, forward_ranges
from roundpipe_cli.planning.search.search import DENSE, SAME, Candidate, Search, SearchEffort, layer_bounds, unit_bounds
from roundpipe_cli.planning.search.stages import StageSums
from roundpipe_cli.units import counted, format_bytes

MIN_ROUNDS, LEAST_ROUNDS = 40, 8
"""Least numbers of chained rounds that judge a plan for staleness 1, of a model with up to `DENSE` layers and of the
deepest: with many short stages a round is soon like the one before."""
BRISK = SearchEffort(cell_work=5.0e7, pattern_cells=200, local_work=2.0e7)
"""Effort for the default accounting, which tries several round sizes and only estimates transfers."""
STEADY = SearchEffort(cell_work=1.0e8, pattern_cells=200, local_work=6.0e7)
"""Effort for chained steps, where each score takes many rounds."""
LIGHT = SearchEffort(cell_work=5.0e6, pattern_cells=30, local_work=3.0e7, enough=2e-3)
"""Effort for a recipe's stages, whose costs are estimates."""
QUICK = SearchEffort(cell_work=2.0e7, pattern_cells=100, local_work=4.0e6)
"""Effort for fewer workers than there are, which are seldom faster."""
SCOUT = SearchEffort(cell_work=3.0e6, pattern_cells=0, local_work=0.0)
"""Effort for choosing the microbatches per round, where most values are far from the best."""
DEEP_LAYERS = 48
"""Above this many layers stages can be cut so evenly that the number of microbatches per round hardly matters."""
NEAR = 1.004
"""Fewer workers are searched in full if a quick search comes as close as this."""
FAR = 1.05
"""Once a length of rounds is slower by this factor, shorter rounds are not tried."""


@dataclass(frozen=True)
class _Task:
    """One question to the search. `per_round` None: at most one microbatch per worker."""

    case: SimulationCase
    sums: StageSums
    workers: tuple[int, ...]
    effort: SearchEffort
    per_round: int | None = None

    @property
    def is_default(self) -> bool:
        """Whether transfers, memory and updates count."""
        return self.case.accounting == "default"

    @property
    def round_size(self) -> int:
        """The most microbatches in a round."""
        return self.per_round or len(self.workers)

    @property
    def speeds(self) -> list[float]:
        """Relative speed of each of `workers`."""
        speeds = worker_speeds(self.case.costs, max(self.workers) + 1)
        return [speeds[worker] for worker in self.workers]

    def scorer(self) -> BatchScorer:
        """A scorer of partitions."""
        case, costs = self.case, self.case.costs
        moves = any(layer.param_bytes or layer.boundary_bytes or layer.grad_bytes for layer in costs.layers)
        return BatchScorer(
            self.sums,
            speeds=self.speeds,
            hop_s=costs.hop_s,
            slots=costs.slots,
            link_bytes_per_s=costs.link_bytes_per_s if self.is_default and moves else None,
            limits=case.limits,
            memory_bytes=costs.device_memory_bytes if self.is_default and case.limits is None else None,
            after_update=self.is_default and case.staleness == 0,
        )

    def bounds(self) -> list[int]:
        """Units of about equal work; single layers where a unit, which may hold two layers, breaks a limit."""
        units, scorer = unit_bounds(self.sums), self.scorer()
        body = [stop - first for first, stop in pairwise(units)]
        finest = one_batch(scorer.numpy, [*body, 1, *reversed(body)], len(body))
        return units if scorer.works(finest)[1].all() else layer_bounds(self.sums)

    def chain(self, num_steps: int | None = None) -> RoundChain:
        """The rounds of the case's steps, or of `num_steps`."""
        case, num_steps = self.case, num_steps or self.case.num_steps
        waits = self.is_default and case.costs.has_updates
        return chain_of(
            case.num_microbatches, self.round_size, staleness=case.staleness, num_steps=num_steps, waits=waits
        )

    def judged(self) -> RoundChain:
        """The rounds by which plans are compared: as `chain`, or more where those are too few for a steady state."""
        chain, layers = self.chain(), self.sums.num_layers
        min_rounds = max(LEAST_ROUNDS, MIN_ROUNDS * DENSE // max(DENSE, layers))
        if chain.from_round and len(chain.round_sizes) < min_rounds:
            return self.chain(2 * -(-min_rounds // (2 * chain.rounds_per_step)))
        return chain


@dataclass(frozen=True)
class _Plan:
    task: _Task
    found: list[Candidate]
    """Partitions, the fastest first."""

    @property
    def value_s(self) -> float:
        """Time per step of the best one."""
        return self.found[0].value_s if self.found else INFEASIBLE


def plan_partition(case: SimulationCase, effort: SearchEffort | None = None) -> StageCut:
    """The partition with the least time per step for the published dispatch.

    Published accounting knows neither transfers nor memory and fixes rounds at one microbatch a worker. With staleness
    1, `num_steps` of 30 or more show the steady state.

    Raises:
        ResourceError: no partition keeps the limits.
    """
    if effort is None:
        effort = BRISK
        if case.accounting == "published":
            effort = STEADY if case.staleness and case.num_steps > 1 else SearchEffort()
    task = _Task(case, StageSums(case.costs), tuple(range(case.num_workers)), effort)
    plan = _best_workers(task)
    if not plan.found:
        raise _does_not_fit(task)
    best = plan.found[0]
    return StageCut(
        forward_ranges(best.sizes[: best.num_forward]),
        backward_ranges(best.sizes[best.num_forward :], task.sums.num_layers),
        plan.task.round_size,
        plan.task.workers,
        explanation=(_shape(best),),
    )


def _best_workers(task: _Task) -> _Plan:
    """The best plan for all workers or, where that is faster, for some of them: the slowest stay idle."""
    plan, workers, speeds = _best_rounds(task), task.workers, task.speeds
    while len(workers) > 1 and plan.found:
        idle = min(reversed(workers), key=lambda worker: speeds[worker])
        workers = tuple(worker for worker in workers if worker != idle)
        fewer = replace(task, workers=workers, effort=QUICK)
        if _least_s(fewer) >= plan.value_s:
            break
        if _search(fewer, plan.value_s * NEAR).value_s < plan.value_s * NEAR:
            other = _best_rounds(replace(fewer, effort=task.effort))
            if other.value_s < plan.value_s:
                plan = other
    return plan


def _least_s(task: _Task) -> float:
    """No partition is faster: workers that never wait, and the head's stage, with as many layers as suits best."""
    sums, count, speed, fastest = task.sums, task.case.num_microbatches, sum(task.speeds), max(task.speeds)
    layers, size = sums.num_layers, min(task.round_size, count)
    once = sums.forward_s[0][layers] + sums.backward_s[0][layers]
    least = INFEASIBLE
    for first in range(layers):
        head = sums.forward_s[first][layers] + sums.backward_s[first][layers]
        busy = count * (once + sums.recompute_s[0][first]) / speed
        through = 0.0 if task.judged().from_round else (once + (size - 1) * head) / fastest
        least = min(least, max(busy, through))
    return least


def _best_rounds(task: _Task) -> _Plan:
    """The best plan over the numbers of microbatches per round that the accounting leaves open.

    A scout for each, the longest rounds first: they have the fewest fills and uploads, so that bounds soon rule out the
    others. Then a search for the best.
    """
    if not task.is_default:
        return _search(task, INFEASIBLE)
    sizes, best = _round_sizes(task), _Plan(task, [])
    if len(sizes) == 1:
        return _search(replace(task, per_round=sizes[0]), INFEASIBLE)
    for per_round in sizes:  # limits of stages do not depend on the round
        scout = _search(replace(task, per_round=per_round, effort=SCOUT), best.value_s * FAR)
        if scout.value_s > best.value_s * FAR:
            break
        if not best.found or scout.value_s <= best.value_s * (1 + SAME):  # shorter rounds where equal
            best = scout
    return _search(replace(best.task, effort=task.effort), INFEASIBLE) if best.found else best


def _round_sizes(task: _Task) -> list[int]:
    """Microbatches per round to try, most first, all rounds of a step equal: about as many as workers, up to four times
    as many, down to half. Deep models take longer and gain less, so few there."""
    count, workers, limits = task.case.num_microbatches, len(task.workers), task.case.limits
    usual = -(-count // -(-count // workers))
    sizes = {-(-count // rounds) for rounds in range(1, count + 1)}
    if limits is not None:
        sizes = set(filter(limits.keeps_round, sizes))
    tried = sorted({usual, *(size for size in sizes if usual <= 2 * size and size <= 4 * workers)}, reverse=True)
    return tried if task.sums.num_layers <= DEEP_LAYERS else [*(size for size in tried if size > usual)][:2] + [usual]


def _search(task: _Task, beat_s: float) -> _Plan:
    return _Plan(task, Search(task.scorer(), task.bounds(), task.judged(), task.effort, beat_s=beat_s).run())


def _shape(best: Candidate) -> str:
    sizes = best.sizes
    forward, later = sizes[: best.num_forward], sizes[best.num_forward + 1 :]
    fused = sizes[best.num_forward] - 1
    head = "the head alone" if not fused else f"the head and {counted(fused, 'layer')} before it, not recomputed"
    parts = [f"{counted(len(forward), 'forward stage')} of {_span(forward)}"] if forward else []
    parts.append(f"{counted(best.num_stages - best.num_forward, 'backward stage')}, the first with {head}")
    if later:
        parts.append(f"the others of {_span(later)}")
    return ", ".join(parts) + "."


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return counted(low, "layer") if low == high else f"{low} to {high} layers"


def _does_not_fit(task: _Task) -> ResourceError:
    sums, costs, limits = task.sums, task.case.costs, task.case.limits
    largest = max(range(sums.num_layers), key=lambda index: sums.backward_bytes(index, index + 1))
    needed = format_bytes(sums.backward_bytes(largest, largest + 1))
    memory = format_bytes(costs.device_memory_bytes or 0)
    return ResourceError(
        "no partition fits: every cut has a stage over its limit",
        where=f"layer {largest} ({costs.layers[largest].name})",
        found=f"{needed} for weights, gradients and activations of the largest layer alone",
        expected=str(limits) if limits else f"{memory} with {costs.slots} slots",
        hint="shorter sequences, smaller microbatches, 4-bit weights or a device with more memory",
    )
