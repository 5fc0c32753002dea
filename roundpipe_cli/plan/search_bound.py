"""A time that no partition with given stage sizes can beat, much cheaper than its time. Seconds, workers of equal speed.

Every worker is busy for its share of the work. Before its first action it waits for the stages before (fill), after its
last one the stages behind still have to run (drain):

      worker 0  FFFFFFFF ....................
      worker 1  ~~FFFFFFFF ...............        ~~ fill: the first microbatch has to come through
      worker 2  ~~~~FFFFFFFF .......... BBB__     __ drain: the last one still has to go on
"""

from __future__ import annotations

from roundpipe_cli.plan.evaluate import Chain
from roundpipe_cli.plan.search_batch import Array, Batch, BatchScorer


def lower_bounds(scorer: BatchScorer, batch: Batch, chain: Chain) -> Array:
    """(C,) seconds per step."""
    numpy = scorer.numpy
    lead, whole, is_head = scorer.works(batch)
    rest = numpy.where(is_head, whole - lead, whole)
    size = max(chain.round_sizes)
    last = chain.round_sizes[-1]
    speed = scorer.speeds.sum()
    workers = scorer.num_workers
    busy = (lead + rest).sum(axis=0)
    if chain.half_end:
        per_step = sum(chain.round_sizes) / chain.num_steps
        steady: Array = busy * per_step / speed * 0.98
        return steady
    fastest = scorer.speeds.max()
    hop = scorer.hop_s
    passed = numpy.cumsum(rest / fastest + hop, axis=0)
    arrival = passed - rest / fastest - lead / fastest
    behind = passed[-1] - passed
    single: Array = (arrival + size * (lead + rest) / fastest + behind).max(axis=0)
    total = busy * sum(chain.round_sizes)
    if len(lead) >= workers and scorer.equal:
        fill = numpy.maximum(arrival[:workers], 0.0).sum(axis=0)
        drain = behind[-workers:].sum(axis=0)
        return numpy.maximum(single, (total + fill + drain) / workers)
    return numpy.maximum(single, total / speed)
