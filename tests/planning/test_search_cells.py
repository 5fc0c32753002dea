"""What a search looks at: cells that may keep the limits, whose bounds no cut beats."""

from __future__ import annotations

import numpy
import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.planning.search.batch import INFEASIBLE, BatchScorer, LinkCosts, chain_of
from roundpipe_cli.planning.search.search import PATTERNS, Search, SearchEffort, make_cells, seeds, unit_bounds
from roundpipe_cli.planning.search.stages import StageLimits, StageSums

BLOCKS = 9
LIMITS = StageLimits(forward_bytes=40, backward_bytes=30, head_bytes=35)


def scorer(limits: StageLimits | None, link_bytes_per_s: float = 1e9) -> BatchScorer:
    block = LayerCost("block", 1.0, 2.0, True, param_bytes=10, boundary_bytes=1)
    head = LayerCost("head", 1.0, 2.0, False, param_bytes=10, boundary_bytes=1)
    sums = StageSums(CostModel("blocks", (*[block] * BLOCKS, head)))
    return BatchScorer(sums, speeds=[1.0] * 3, hop_s=0.0, links=LinkCosts(link_bytes_per_s, 2), limits=limits)


def bounds() -> list[int]:
    return list(range(BLOCKS + 1))


def test_cells_that_no_limit_allows_are_left_out() -> None:
    """All cells with a cut within the limits stay, and most of the others go before anything is computed for them."""
    chain = chain_of(6, 3, staleness=0, num_steps=1)
    all_cells, kept = make_cells(scorer(None), bounds(), chain), make_cells(scorer(LIMITS), bounds(), chain)
    assert len(kept) < len(all_cells) / 2
    left = set(zip(kept.forward.tolist(), kept.later.tolist(), kept.head.tolist(), strict=True))
    for pattern in [(forward, later) for forward in PATTERNS for later in PATTERNS]:
        batch, index = seeds(scorer(LIMITS), bounds(), all_cells, pattern)
        fits = scorer(LIMITS).works(batch)[1]
        good = all_cells.take(index[numpy.flatnonzero(fits)])
        assert set(zip(good.forward.tolist(), good.later.tolist(), good.head.tolist(), strict=True)) <= left


@pytest.mark.parametrize("link_bytes_per_s", [1e9, 2.0])
@pytest.mark.parametrize("per_round", [2, 6])
def test_no_cut_beats_the_bound_of_its_cell(per_round: int, link_bytes_per_s: float) -> None:
    """Where links bind the bound counts what they carry, so that short rounds are ruled out without a simulation."""
    chain = chain_of(6, per_round, staleness=0, num_steps=1)
    one = scorer(LIMITS, link_bytes_per_s)
    cells = make_cells(one, bounds(), chain)
    batch, index = seeds(one, bounds(), cells, ("smaller first", "larger first"))
    values = one.score(batch, chain)
    assert (values >= cells.bound_s[index] * (1 - 1e-9)).all()
    if link_bytes_per_s == 2.0:
        assert cells.bound_s.min() > 6 * BLOCKS * 4 / 3, "more than arithmetic alone"


def test_limits_that_nothing_keeps_find_nothing() -> None:
    """A head over its limit leaves no cell, and the search says so by finding no partition."""
    one, chain = scorer(StageLimits(head_bytes=5)), chain_of(6, 3, staleness=0, num_steps=1)
    search = Search(one, bounds(), chain, SearchEffort())
    assert search.run() == [] and search.least_s == INFEASIBLE


def test_units_are_the_blocks() -> None:
    """Equal blocks are units of one layer each, which the cells above count in."""
    block, head = LayerCost("block", 1.0, 2.0, True), LayerCost("head", 1.0, 2.0, False)
    assert unit_bounds(StageSums(CostModel("blocks", (*[block] * BLOCKS, head)))) == bounds()
