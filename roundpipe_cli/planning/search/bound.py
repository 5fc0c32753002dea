"""A time that a partition with given stage sizes cannot beat, much cheaper than its time. Seconds.

Every worker is busy for its share of the work. Before its first action it waits for the stages before (fill), after its
last one the stages behind still have to run (drain):

      worker 0  FFFFFFFF ....................
      worker 1  ~~FFFFFFFF ...............        ~~ fill: the first microbatch has to come through
      worker 2  ~~~~FFFFFFFF .......... BBB__     __ drain: the last one still has to go on
"""

from __future__ import annotations

from roundpipe_cli.planning.search.batch import Array, BatchScorer, Works
from roundpipe_cli.planning.search.chain import RoundChain


def lower_bounds(scorer: BatchScorer, works: Works, chain: RoundChain) -> Array:
    """(C,) seconds per step."""
    numpy = scorer.numpy
    lead, rest = works.lead_s, numpy.where(works.is_head, works.whole_s - works.lead_s, works.whole_s)
    whole, workers = lead + rest, scorer.num_workers
    speed, fastest = scorer.speeds.sum(), scorer.speeds.max()
    busy = whole.sum(axis=0) * sum(chain.round_sizes[: chain.rounds_per_step])
    if chain.from_round and not chain.waits:
        return busy / speed
    hop = numpy.where(works.real, works.hop_s, 0.0)
    passed = numpy.cumsum(rest / fastest + hop, axis=0)
    before = passed - (rest + lead) / fastest
    behind = passed[-1] - passed
    single = numpy.where(works.real, before + max(chain.round_sizes) * whole / fastest + behind, 0.0).max(axis=0)
    if chain.from_round:  # two steps are under way at most
        return numpy.maximum(single / 2, busy / speed)
    if not scorer.equal or len(lead) < workers or not works.real[workers - 1].all():
        return numpy.maximum(single, busy / speed)
    fill = numpy.maximum(before[:workers], 0.0).sum(axis=0)
    rank = works.real.sum(axis=0) - numpy.arange(len(lead))[:, None]
    drain = numpy.where((rank >= 1) & (rank <= workers), behind, 0.0).sum(axis=0)
    return numpy.maximum(single, (busy + fill + drain) / workers)
