"""Stages for workers that hold all frozen weights.

Where every worker has the weights, nothing is gained by passing a microbatch on: each stays on one worker from its
forward to its backward, and stages are cut for memory alone. As many blocks as its activations allow go into the
stage with the head, whose activations need no recompute:

    all fit       worker 0   0B 2B ...        some do     worker 0   0F 0B 0R 0B   2F 2B 2R 2B ...
                  worker 1   1B 3B ...                    worker 1   1F 1B 1R 1B   3F 3B 3R 3B ...

Only what is trained is uploaded, once a step, and each microbatch's gradients of it go to the host, which adds them
up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from roundpipe_cli.costs.analytic import Case, analytic_costs
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.memory import whole_cache_bytes, with_cached_weights
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.schedule.builders import Options

DEALING = Options(earliest_free=True)
AnyCase = TypeVar("AnyCase", bound=Case)


def with_all_weights(case: AnyCase) -> AnyCase | None:
    """The case for GPUs that hold all weights from the start, so that stages need no room for them; None where they
    cannot. CPU workers read the host's weights, so for them it is the case itself.

    Args:
        case: of a recipe that leaves it open, see `Recipe.may_hold_all_weights`.
    """
    gpus, costs, settings = case.gpus, case.costs, case.settings
    if costs.layers[0].name != "embed":
        return None
    if len(gpus) < case.num_workers:
        return None if gpus or case.num_workers == 1 else case
    cache_bytes = whole_cache_bytes(costs.layers)
    if settings.unpacks_once:  # a stage is most of the model then
        settings = replace(settings, unpacks_once=False)
        anew = analytic_costs(case.architecture, settings, case.hardware)
        costs = replace(anew, link_bytes_per_s=costs.link_bytes_per_s)
    settings = replace(settings, weight_cache_bytes=cache_bytes)
    return replace(case, settings=settings, costs=with_cached_weights(costs, cache_bytes, settings.dtype_bytes))


def resident_cut(costs: CostModel, num_workers: int, keeps: Callable[[StageCut], bool]) -> StageCut | None:
    """The stages with the fewest recomputes among those that keep the limits of `keeps`; None if none does.

    Args:
        costs: their first layer is an embedding, which is gathered on the host.
    """
    num_blocks = len(costs.layers) - 2
    numbers = range(1, num_blocks + 1)  # what a stage takes grows with its blocks
    fitting = bisect_left(numbers, True, key=lambda count: not keeps(_with_head(num_blocks, count, num_workers)))
    return _with_head(num_blocks, fitting, num_workers) if fitting else None


def _with_head(num_blocks: int, count: int, num_workers: int) -> StageCut:
    """The last `count` blocks with the head; the others in one forward stage and backward stages of as many at most."""
    stages = even_cut(num_blocks + 2, num_blocks, count, beside_head=count)
    return StageCut(*stages, num_workers, dealing=DEALING)
