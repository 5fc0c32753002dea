"""Stages of a step whose sequences come in chunks.

A backward stage starts with the last chunk, so nothing of a sequence goes backward before all of it has gone forward.

    worker 0 | 0F | 3F |      . 2B | 5B |      with one sequence a step it is filled and drained twice; many short
    worker 1   | 1F | 4F |    . 3B | 6B |      stages make that short, uneven ones make workers wait
    worker 2     | 2F | 0B(head) 1B | 4B |

Stages have equal numbers of blocks. One after the other, the best size of backward stages, of forward stages and of
rounds is taken, twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

from roundpipe_cli.planning.compare import Keeps, SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.dealing import MIN_GAIN, head_spread
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.schedule.builders import Dealer

MAX_ROUND_SIZES = 4
ROUND_PER_WORKER = 4
"""Most microbatches per worker in a round: the host keeps the round's boundaries, keys and values."""
MAX_SIMULATED_CHUNKS = 64
"""Chunks of the sequences that are dealt out and simulated, one sequence at least."""


def chunk_shapes(case: SimulationCase, keeps: Keeps | None = None) -> list[StageCut]:
    """Shapes of a step that keep the limits, the fastest first by the clocks of the dealing, which know no transfers;
    only that of least memory where none does. The head is alone in its stage."""
    num_layers, num_free = len(case.costs.layers), int(case.costs.layers[0].name == "embed")
    blocks = max(1, num_layers - 1 - num_free)
    sizes, rounds = sorted({-(-blocks // count) for count in range(1, blocks + 1)}), _round_sizes(case)
    timed: dict[tuple[int, ...], tuple[float, StageCut]] = {}

    def clock_s(shape: tuple[int, ...]) -> float:
        if shape not in timed:
            cut = StageCut(*even_cut(num_layers, *shape[:2], num_free=num_free), shape[2])
            timed[shape] = (_clock_s(case, cut) if keeps is None or keeps(cut) else math.inf), cut
        return timed[shape][0]

    best: tuple[int, ...] = (1, 1, rounds[0])
    for place, values in 2 * ((1, sizes), (0, sizes), (2, rounds)):
        best = min(((*best[:place], value, *best[place + 1 :]) for value in values), key=clock_s)
    kept = sorted((shape for shape in timed if clock_s(shape) < math.inf), key=lambda shape: (clock_s(shape), shape))
    return [timed[shape][1] for shape in kept or [(1, 1, rounds[0])]]


def _round_sizes(case: SimulationCase) -> list[int]:
    """Microbatches per round to try: of whole sequences, all rounds of a step about equal."""
    chunks, num_sequences = case.sequence_chunks, case.num_microbatches // case.sequence_chunks
    rounds = sorted({-(-num_sequences // count) * chunks for count in range(1, num_sequences + 1)})
    most = max(chunks, ROUND_PER_WORKER * case.num_workers)
    return [size for size in rounds if size <= most][-MAX_ROUND_SIZES:] or rounds[:1]


def _clock_s(case: SimulationCase, cut: StageCut) -> float:
    stages, per_round = (cut.forward_stages, cut.backward_stages), cut.microbatches_per_round or case.num_microbatches
    dealer = Dealer(case.num_workers, case.costs, stages, case.options, sequence_chunks=case.sequence_chunks)
    for start in range(0, case.num_microbatches, per_round):
        dealer.deal_round(range(start, min(start + per_round, case.num_microbatches)))
    return max(dealer.free_s)


NUM_SIMULATED = 2
"""So many of the shapes of a step in chunks that are fastest without transfers are simulated with transfers."""


def chunk_cut(case: SimulationCase, keeps: Keeps | None = None) -> StageCut:
    """Stages of roundpipe where sequences come in chunks, and the head's workers if the case leaves them open."""
    sequences = max(1, MAX_SIMULATED_CHUNKS // case.sequence_chunks)
    case = replace(case, num_microbatches=min(case.num_microbatches, sequences * case.sequence_chunks), num_steps=1)
    shapes = chunk_shapes(case, keeps)[:NUM_SIMULATED]
    narrow_s, _, narrow = min((run_step_s("roundpipe", cut, case), index, cut) for index, cut in enumerate(shapes))
    spread = head_spread(case)
    if spread is None:
        return narrow
    wide = replace(chunk_shapes(replace(case, options=spread), keeps)[0], dealing=spread)
    return wide if run_step_s("roundpipe", wide, case) < narrow_s * (1 - MIN_GAIN) else narrow
