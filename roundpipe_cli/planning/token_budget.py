"""Tokens of a microbatch where a recipe says `auto`, for `plan` and a run alike: what is fastest on the machine.

    tokens                     1,024   2,048   4,096   8,192  16,384
    launches a step             many    half         ...
    activations that stay       most    half         ...            the fewer stay, the more is computed again
    microbatches for N workers  many    half         ...            with fewer than N some workers wait

A closed formula tells the times apart within 3 % (`scripts/auto_microbatches.py`), for a step's F, R and B of M
microbatches on N workers; a simulation of each would take seconds:

    streamed   max(M (F + R + B) / N, F + B of one, links) + the time until every worker has work; R without the blocks
               that have room beside the head
    resident   ceil(M / N) (F + R + B), R without the blocks whose activations a card has room for beside all weights
    bound      (M + N - 1) (F + R + B) / N, the N - 1 divided by a worker's number of stages
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from roundpipe_cli.choices import SCHEDULE_KINDS
from roundpipe_cli.costs.analytic import Case
from roundpipe_cli.costs.cost import LayerCost
from roundpipe_cli.costs.memory import DEVICE_SHARE, FITTING_SHARE, device_need, usable_host_bytes
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run_step_s
from roundpipe_cli.planning.cuts import MAX_SHORT_ROUND, enough_per_round, most_beside_head, stage_sizes
from roundpipe_cli.planning.dealing import MAX_JUDGED_ROUNDS, head_spread
from roundpipe_cli.planning.resident import resident_cut, with_all_weights
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.search.stages import StageLimits
from roundpipe_cli.planning.verdict import coarsest_cut, has_room, judge, judge_coarsest, stage_limits
from roundpipe_cli.recipe.schema import Recipe

BUDGETS = (1024, 2048, 4096, 8192, 16384)
"""Tokens of a microbatch that are tried on GPUs; a row of `max_seq_length` at least."""
TIE = 0.005
"""Budgets whose times differ by less are taken for equal, and the largest of them wins: it has fewest launches."""
WARY = 1.03
"""A budget counts as so much slower that leaves a GPU less free than stages should, that needs the disk in every round,
or for whose rounds the host is short of memory."""
FILL, SHARED_FILL = 0.8, 0.2
"""A step takes longer by this part of a block's passes for each further worker: until all have work, and at its end;
less where workers share its last stages, whose weights each of them then uploads."""
UNSHARED = 0.003
"""A step of more microbatches than the planner shares stages out for takes longer by this part for each further worker:
rounds do not divide evenly among them."""
SHARED_LINK, SHARED_HOST = 0.3, 0.5
"""Stages are shared where a worker's link carries all weights in this part of a step, and the host's memory serves all
links."""
SIMULATED = 8
"""Microbatches that are simulated where all weights are trained, at least two for each worker."""
CPU_TOKENS = 2048
"""Most tokens of a microbatch for processors, which fetch no weights."""
MIN_MICROBATCHES = 4
"""A step keeps at least so many microbatches on processors, and of short rows everywhere, whatever the number of
workers."""
MICROBATCHES_KEPT = 16
"""With processors the host must have room for the boundaries of so many: rounds of two for each of eight workers."""
CPU_SHARE = 1 / 8
"""Share of the host's memory for the activations of one CPU worker."""


def budgets(recipe: Recipe) -> list[int]:
    """The tokens of whole rows that are tried on GPUs, up to those of a step."""
    row = recipe.tokens_of_full_row
    return sorted({min(max(1, tokens // row), recipe.rows_per_step) * row for tokens in BUDGETS})


def fastest(recipe: Recipe, cases: Mapping[int, Case]) -> int:
    """The largest of the fastest budgets on GPUs; the smallest if none fits, or with weights from the disk, where
    launches take no time that shows and workers wait longer for larger microbatches.

    Args:
        cases: the recipe with microbatches of so many tokens.
    """
    times_s = {tokens: estimated_step_s(recipe, case) for tokens, case in cases.items()}
    least_s = min(times_s.values())
    if least_s == math.inf:
        return min(cases)
    ties = [tokens for tokens, step_s in times_s.items() if step_s <= (1 + TIE) * least_s]
    return min(ties) if any(case.settings.weights_on_disk for case in cases.values()) else max(ties)


def estimated_step_s(recipe: Recipe, case: Case) -> float:
    """Seconds of a step on GPUs by the formulas above, `WARY` times as many for each memory that is short; infinite if
    it does not fit."""
    if not judge_coarsest(case).fits:
        return math.inf
    is_short = case.settings.weights_on_disk, not judge_coarsest(_with_margin(case)).fits
    return _by_formula(recipe, case) * WARY ** sum(is_short)


def _by_formula(recipe: Recipe, case: Case) -> float:
    if recipe.pipeline.binds_stages:  # the last worker waits until a microbatch has passed through those before
        layers, workers = case.costs.layers, case.num_workers
        loops = 1 if SCHEDULE_KINDS[recipe.pipeline.schedule].one_stage_each else max(1, len(layers) // workers)
        return (case.settings.num_microbatches + (workers - 1) / loops) * sum(map(_passes_s, layers)) / workers
    streamed_s = _streamed_s(case)
    if case.settings.method == "full" and case.settings.sequence_chunks == 1:
        return _simulated_s(case, streamed_s)
    return min(streamed_s, _resident_s(case) if recipe.may_hold_all_weights else math.inf)


def for_processors(recipe: Recipe, case_of_one: Callable[[int], Case]) -> int:
    """The most tokens up to `CPU_TOKENS` for which one worker has room and that divide a step, whatever the number of
    workers: microbatches, and with them bits, do not depend on it.

    Args:
        case_of_one: the recipe with microbatches of so many tokens on one worker.
    """
    row, per_step = recipe.tokens_of_full_row, recipe.rows_per_step
    for rows in range(max(1, CPU_TOKENS // row), 1, -1):
        if per_step // rows >= MIN_MICROBATCHES and not per_step % rows and suits_processors(case_of_one(rows * row)):
            return rows * row
    return row


def suits_processors(case: Case) -> bool:
    """Whether the host has room for several workers as this one."""
    kept = replace(coarsest_cut(case), microbatches_per_round=min(MICROBATCHES_KEPT, case.settings.num_microbatches))
    need = device_need(case, *even_cut(len(case.costs.layers), 1, 1))
    return judge(case, kept).fits and need.total_bytes <= CPU_SHARE * usable_host_bytes(case.hardware)


def _with_margin(case: Case) -> Case:
    """The case with the memory of each GPU that stages may fill."""
    share = DEVICE_SHARE / FITTING_SHARE
    devices = tuple(
        device if device.is_cpu else replace(device, memory_bytes=int(share * device.memory_bytes))
        for device in case.hardware.devices
    )
    return replace(case, hardware=replace(case.hardware, devices=devices, disk_free_bytes=None))


def _streamed_s(case: Case) -> float:
    """Stages pass through the workers, their weights with them."""
    costs, workers, count = case.costs, case.num_workers, case.settings.num_microbatches
    limits, blocks = stage_limits(case), costs.layers[1:-1]
    beside, enough = _beside_head(case, limits), enough_per_round(costs, workers, count, limits)
    per_round = _round(case, enough)
    once_s = sum(layer.forward_s + layer.backward_s for layer in costs.layers)
    again_s = sum(layer.recomputed_s for layer in blocks[: len(blocks) - beside])
    rounds = math.ceil(count / per_round)
    visits_s = 2 * rounds * sum(layer.visit_s for layer in costs.layers)
    speed = sum(costs.worker_speed or (1.0,) * workers)
    compute_s = max((count * (once_s + again_s) + visits_s) / speed, once_s)
    num_bytes = 2 * rounds * sum(layer.param_bytes for layer in costs.layers)
    link_s = num_bytes / costs.link_bytes_per_s
    host_s = workers * num_bytes / costs.host_bytes_per_s if costs.host_bytes_per_s else math.inf
    may_share = costs.has_frozen_blocks and link_s <= SHARED_LINK * compute_s and host_s <= SHARED_HOST * compute_s
    fill_s = (workers - 1) * max(map(_passes_s, blocks)) * (SHARED_FILL if may_share else FILL)
    is_long = costs.has_frozen_blocks and count > MAX_JUDGED_ROUNDS * workers
    waits = 1 + UNSHARED * (workers - 1) if is_long else 1.0
    return (max(compute_s, link_s / workers) + fill_s) * waits * (WARY if per_round < enough else 1.0)


def _round(case: Case, enough: int) -> int:
    """Microbatches of a round: `enough`, as far as the host has room for their boundaries."""
    workers, cut, per_round = case.num_workers, coarsest_cut(case), enough
    while per_round > workers and not judge(case, replace(cut, microbatches_per_round=per_round)).fits:
        per_round = max(workers, per_round // 2)
    return per_round


def _beside_head(case: Case, limits: StageLimits) -> int:
    """Blocks in the head's stage, which on several workers takes no longer than the others."""
    costs, head, beside = case.costs, case.costs.layers[-1], most_beside_head(case.costs, limits)
    if case.num_workers == 1:
        return beside
    share_s = sum(map(_passes_s, costs.layers)) / case.num_workers - head.forward_s - head.backward_s
    return max(0, min(beside, int(share_s / max(block.forward_s + block.backward_s for block in costs.layers[1:-1]))))


def _simulated_s(case: Case, streamed_s: float) -> float:
    """Where all weights are trained: the fastest of a few even cuts, whose gradients and updates take the host's memory
    and keep workers waiting, of a step's first microbatches; more of them take what `streamed_s` has for each.

    Args:
        streamed_s: by the formula.
    """
    costs, workers, limits = case.costs, case.num_workers, stage_limits(case)
    count = min(case.settings.num_microbatches, max(SIMULATED, 2 * workers))
    short = SimulationCase(costs, workers, count, limits=limits, auto_head=True)
    per_round = min(count, max(MAX_SHORT_ROUND, enough_per_round(costs, workers, count, limits)))
    most, spread, num_layers = stage_sizes(costs, limits), head_spread(short), len(costs.layers)
    if workers == 1:
        sizes = (max(1, one // 3) for one in most)
        cuts = [StageCut(*even_cut(num_layers, *sizes, beside_head=_beside_head(case, limits)), per_round)]
    else:
        fine, coarse = even_cut(num_layers, 1, 1), even_cut(num_layers, *(min(2, one) for one in most))
        cuts = [StageCut(*fine, count, dealing=spread), StageCut(*coarse, per_round), StageCut(*fine, per_round)]
    fitting = [cut for cut in cuts if judge(case, cut).fits] or cuts[-1:]
    least_s = min(run_step_s("roundpipe", cut, short) for cut in fitting)
    return least_s + (1 - count / case.settings.num_microbatches) * streamed_s


def _resident_s(case: Case) -> float:
    """Each microbatch stays on one worker, which holds all weights; infinite if they have no room."""
    whole = with_all_weights(case)
    if whole is None:
        return math.inf
    cut = resident_cut(whole.costs, whole.num_workers, lambda one: has_room(whole, judge(whole, one)))
    if cut is None:
        return math.inf
    layers, first_kept = whole.costs.layers, cut.backward_stages[0][0]
    each_s = sum(map(_passes_s, layers)) - sum(layer.recomputed_s for layer in layers[first_kept:])
    count, workers = whole.settings.num_microbatches, whole.num_workers
    if count < workers:  # those without a microbatch compute again for the others
        return max(count * each_s / workers, sum(layer.forward_s + layer.backward_s for layer in layers))
    return math.ceil(count / workers) * each_s


def _passes_s(layer: LayerCost) -> float:
    return layer.forward_s + layer.recomputed_s + layer.backward_s
