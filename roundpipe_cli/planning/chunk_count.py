"""Chunks of a sequence where a recipe says `auto`, for `plan` and a run alike: 1 where whole rows fit, otherwise the
fastest of a few numbers that fit.

More chunks take less of a card's memory, let a worker wait less for the chunks before its own, and are launched more
often. The formula of `token_budget` tells the two best numbers, and a simulation of few sequences the better of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roundpipe_cli.costs.analytic import Case
from roundpipe_cli.planning.choose import case_for
from roundpipe_cli.planning.chunk_shapes import MAX_SIMULATED_CHUNKS, NUM_SIMULATED, chunk_shapes
from roundpipe_cli.planning.compare import run_step_s
from roundpipe_cli.planning.token_budget import TIE, estimated_step_s, suits_processors
from roundpipe_cli.planning.verdict import judge, judge_coarsest, stage_limits
from roundpipe_cli.recipe.check import MIN_CHUNK_TOKENS
from roundpipe_cli.recipe.schema import Recipe

CHUNKS_KEY = "pipeline.sequence_chunks"
CHUNK_COUNTS = (2, 4, 8, 16, 32)
"""Numbers that are tried where whole rows do not fit."""


def with_chunks(recipe: Recipe, count: int) -> Recipe:
    """The recipe with rows of so many chunks; in more than one, its microbatches have `micro_batch_size` rows."""
    recipe = replace(recipe, pipeline=replace(recipe.pipeline, sequence_chunks=count))
    return recipe if count == 1 or recipe.micro_batch_tokens != "auto" else replace(recipe, micro_batch_tokens=None)


def chunk_counts(max_seq_length: int) -> list[int]:
    """Numbers that are tried: chunks of `MIN_CHUNK_TOKENS` at least."""
    return [count for count in CHUNK_COUNTS if count <= max_seq_length // MIN_CHUNK_TOKENS]


def best_number(recipe: Recipe, cases: Mapping[int, Case]) -> int:
    """The fastest on GPUs, of equal ones the fewest. With processors, of whose cases each has one, the fewest for which
    several workers have room, or else the most that fit. 1 where none fits."""
    fitting = {count: case for count, case in cases.items() if judge_coarsest(case).fits}
    if not fitting:
        return 1
    if not next(iter(fitting.values())).gpus:
        return next((count for count, case in fitting.items() if suits_processors(case)), max(fitting))
    times_s = {count: estimated_step_s(with_chunks(recipe, count), case) for count, case in fitting.items()}
    best = sorted(times_s, key=times_s.__getitem__)[:NUM_SIMULATED]
    if len(best) > 1 and not recipe.pipeline.binds_stages:
        sequences = max(1, MAX_SIMULATED_CHUNKS // max(best))
        times_s = {count: _simulated_s(recipe, fitting[count], sequences) for count in best}
    return min(count for count, step_s in times_s.items() if step_s <= (1 + TIE) * min(times_s.values()))


def _simulated_s(recipe: Recipe, case: Case, sequences: int) -> float:
    """Seconds of so many sequences, or of a step if that has fewer."""
    chunks = case.settings.sequence_chunks
    num_microbatches = min(case.settings.num_microbatches, sequences * chunks)
    counts, limits = (case.num_workers, num_microbatches), stage_limits(case)
    asked = case_for(with_chunks(recipe, chunks).pipeline, case.costs, counts, limits)
    cut = chunk_shapes(asked, lambda one: judge(case, one).fits)[0]
    return run_step_s("roundpipe", cut, asked)
