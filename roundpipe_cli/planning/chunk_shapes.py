"""Stages of a step whose sequences come in chunks.

A backward stage starts with the last chunk, so nothing of a sequence goes backward before all of it has gone forward.

    worker 0 | 0F | 3F |      . 2B | 5B |      with one sequence a step it is filled and drained twice; many short
    worker 1   | 1F | 4F |    . 3B | 6B |      stages make that short, uneven ones make workers wait
    worker 2     | 2F | 0B(head) 1B | 4B |

Few shapes are worth trying, so all are: stages of about equal time, as many of them as there are ways to put 1, 2, 3
... blocks into one. Seconds.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.planning.compare import Keeps, SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.dealing import faster, head_spread
from roundpipe_cli.planning.search.ranges import balanced_sizes, forward_ranges
from roundpipe_cli.schedule.actions import stage_times
from roundpipe_cli.schedule.builders import Dealer

MAX_ROUND_SIZES = 4
ROUND_PER_WORKER = 4
"""Most microbatches per worker in a round: the host keeps the round's boundaries, keys and values."""

Shape = tuple[tuple[StageRange, ...], tuple[StageRange, ...], int]
"""Forward stages, backward stages (the head alone first), microbatches per round."""


def chunk_shapes(case: SimulationCase) -> list[StageCut]:
    """Shapes of a step, the fastest first by the clocks of the dealing, which know no transfers."""
    costs, chunks, head = case.costs, case.sequence_chunks, len(case.costs.layers) - 1
    whole = [(index, index) for index in range(head + 1)]
    times = stage_times(costs, whole, whole, fused_head=False)
    backward_s = [sum(passes) for passes in zip(times.recompute_s, times.backward_s, strict=True)]
    counts = sorted({-(-head // size) for size in range(1, head + 1)})
    forward = {forward_ranges(balanced_sizes(times.forward_s[:head], count)) for count in counts}
    backward = {forward_ranges(balanced_sizes(list(reversed(backward_s[:head])), count)) for count in counts}
    num_sequences = case.num_microbatches // chunks
    rounds = sorted({-(-num_sequences // count) * chunks for count in range(1, num_sequences + 1)})
    timed = []
    most = max(chunks, ROUND_PER_WORKER * case.num_workers)
    rounds = [size for size in rounds if size <= most][-MAX_ROUND_SIZES:] or rounds[:1]
    for first, second, per_round in product(sorted(forward), sorted(backward), rounds):
        mirrored = tuple((head - 1 - last, head - 1 - start) for start, last in second)
        shape = (first, ((head, head), *mirrored), per_round)
        timed.append((_clock_s(case, shape), shape))
    return [StageCut(*shape) for _, shape in sorted(timed)]


def _clock_s(case: SimulationCase, shape: Shape) -> float:
    forward, backward, per_round = shape
    stages, chunks = (forward, backward), case.sequence_chunks
    dealer = Dealer(case.num_workers, case.costs, stages, case.options, sequence_chunks=chunks)
    for start in range(0, case.num_microbatches, per_round):
        dealer.deal_round(range(start, min(start + per_round, case.num_microbatches)))
    return max(dealer.free_s)


NUM_SIMULATED = 4
"""So many of the shapes of a step in chunks that are fastest without transfers are simulated with transfers."""


def chunk_cut(case: SimulationCase, keeps: Keeps | None = None) -> StageCut:
    """Stages of roundpipe where sequences come in chunks, and the head's workers if the case leaves them open."""
    narrow = _chunk_cut(case, keeps)
    spread = head_spread(case)
    if spread is None:
        return narrow
    wide = replace(_chunk_cut(replace(case, options=spread), keeps), dealing=spread)
    return faster(narrow, wide, case)


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
