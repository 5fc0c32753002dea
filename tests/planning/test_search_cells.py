"""What a search looks at: cells that may keep the limits, whose bounds no cut beats."""

from __future__ import annotations

import numpy
import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.planning.search import search
from roundpipe_cli.planning.search.batch import INFEASIBLE, BatchScorer, chain_of
from roundpipe_cli.planning.search.search import (
    PATTERNS,
    Search,
    SearchEffort,
    make_cells,
    neighbours,
    seeds,
    unit_bounds,
)
from roundpipe_cli.planning.search.stages import StageLimits, StageSums

BLOCKS = 9
LIMITS = StageLimits(forward_bytes=40, backward_bytes=30, head_bytes=35)


def scorer(limits: StageLimits | None, link_bytes_per_s: float = 1e9) -> BatchScorer:
    block = LayerCost("block", 1.0, 2.0, True, param_bytes=10, boundary_bytes=1)
    head = LayerCost("head", 1.0, 2.0, False, param_bytes=10, boundary_bytes=1)
    sums = StageSums(CostModel("blocks", (*[block] * BLOCKS, head)))
    return BatchScorer(sums, speeds=[1.0] * 3, hop_s=0.0, link_bytes_per_s=link_bytes_per_s, limits=limits)


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
    works, fits = one.works(batch)
    values = numpy.where(fits, one.step_s(works, chain), INFEASIBLE)
    assert (values >= cells.bound_s[index] * (1 - 1e-9)).all()
    if link_bytes_per_s == 2.0:
        assert cells.bound_s.min() > 6 * BLOCKS * 4 / 3, "more than arithmetic alone"


def test_limits_that_nothing_keeps_find_nothing() -> None:
    """A head over its limit leaves no cell, and the search says so by finding no partition."""
    one, chain = scorer(StageLimits(head_bytes=5)), chain_of(6, 3, staleness=0, num_steps=1)
    tried = Search(one, bounds(), chain, SearchEffort())
    assert tried.run() == [] and tried.least_s == INFEASIBLE


def test_units_are_the_blocks() -> None:
    """Equal blocks are units of one layer each, which the cells above count in."""
    block, head = LayerCost("block", 1.0, 2.0, True), LayerCost("head", 1.0, 2.0, False)
    assert unit_bounds(StageSums(CostModel("blocks", (*[block] * BLOCKS, head)))) == bounds()


def deep(blocks: int) -> CostModel:
    """Blocks without memory limits, and a head of two blocks' time."""
    block, head = (
        LayerCost("block", 1.0, 2.0, True, param_bytes=10, boundary_bytes=1),
        LayerCost("head", 2.0, 4.0, False),
    )
    return CostModel("deep", (*[block] * blocks, head), hop_s=0.01)


def test_memory_of_a_search_does_not_grow_with_the_cube_of_the_layers() -> None:
    """500 layers took 7 GB: 125 million cells, and a million neighbours of a thousand stages each."""
    costs, chain = deep(499), chain_of(16, 8, staleness=0, num_steps=1)
    one = BatchScorer(StageSums(costs), speeds=[1.0] * 8, hop_s=0.01)
    cells = make_cells(one, list(range(500)), chain)
    assert len(cells) < 1_000_000
    assert {int(cells.forward.max()), int(cells.later.max())} == {499}, "one layer a stage is always tried"
    sizes = 1 + numpy.arange(999) % 2
    near = neighbours(numpy, sizes, 499)
    assert 0 < near.size < 5_000_000
    for direction in (slice(0, 500), slice(499, 999)):
        assert (near[:, direction].sum(axis=1) == sizes[direction].sum()).all(), "every layer once"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_search_of_few_numbers_of_stages_loses_little(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep models are searched by samples; done so to a model that can be searched in full, it finds as good a cut."""
    chain = chain_of(8, 4, staleness=staleness, num_steps=4)
    one, units = BatchScorer(StageSums(deep(60)), speeds=[1.0] * 4, hop_s=0.01), list(range(61))
    effort = SearchEffort(cell_work=2e7, pattern_cells=50, local_work=1e7)
    whole = Search(one, units, chain, effort).run()[0]
    monkeypatch.setattr(search, "DENSE", 12)
    monkeypatch.setattr(search, "MOST_MOVED", 1500)
    assert Search(one, units, chain, effort).run()[0].value_s <= whole.value_s * 1.005
