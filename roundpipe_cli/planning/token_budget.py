"""Tokens of a microbatch where a recipe says `auto`, for `plan` and a run alike.

    rows of max_seq_length tokens     1     2     4     8       the largest count is taken
    tokens                         2048  4096  8192 16384       that the card has room for
    microbatches of a full step      64    32    16     8       and that leaves enough microbatches

Neither the number of workers nor that of machines is asked for, so that a run's microbatches, and with them its bits,
are the same on one such card and on eight.
"""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.costs.analytic import Case, case_of
from roundpipe_cli.costs.hardware import Hardware
from roundpipe_cli.costs.memory import (
    DEVICE_SHARE,
    FITTING_SHARE,
    device_need,
    fixed_device_need,
    usable_device_bytes,
    usable_host_bytes,
    whole_cache_bytes,
)
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.verdict import coarsest_cut, judge

USUAL_TOKENS = 8192
"""Tokens with which products take longer than launches and uploads of weights (rule of thumb)."""
EXPERT_TOKENS = 16384
"""Tokens of a microbatch for models whose experts each get a small share of the tokens."""
CPU_TOKENS = 2048
"""Tokens of a microbatch for the processor, which fetches no weights."""
MIN_MICROBATCHES = 4
"""A step keeps at least so many microbatches, whatever the number of workers, of full rows as of short ones."""
MIN_LARGE_MICROBATCHES = 16
"""Least microbatches of a step where one has more than `USUAL_TOKENS`."""
MICROBATCHES_KEPT = 16
"""The host must have room for the boundaries of so many: rounds of two for each of eight workers."""
CPU_SHARE = 1 / 8
"""Share of the host's memory for the activations of one CPU worker."""


def choose_token_budget(
    architecture: Architecture, settings: TrainingSettings, smallest: Hardware, *, may_hold: bool = False
) -> int:
    """Tokens of a microbatch, padding included: a row's `max_seq_length`, or as many times as many as divides a step.

    Where a card has room for all weights and, with fewer tokens, for the activations of all blocks too, so that nothing
    is computed twice, there are no more tokens than that.

    Args:
        settings: with one row in a microbatch, and the rows of a step as microbatches.
        smallest: `with_smallest_card`; one that two workers share counts as two of half its memory.
        may_hold: all weights may stay on a card, see `Recipe.may_hold_all_weights`.
    """
    row_tokens = settings.sequences_per_row * settings.max_seq_length
    if architecture.is_guess:
        return row_tokens
    on_cpu = smallest.devices[0].is_cpu
    has_experts = any(block.num_experts for block in architecture.blocks)
    wanted = CPU_TOKENS if on_cpu else EXPERT_TOKENS if has_experts else USUAL_TOKENS
    fitting = []
    for rows in range(max(1, wanted // row_tokens), 0, -1):
        count = settings.num_microbatches // rows
        least = MIN_LARGE_MICROBATCHES if rows * row_tokens > USUAL_TOKENS else MIN_MICROBATCHES
        if count < least or settings.num_microbatches % rows:
            continue
        tried = replace(settings, micro_batch_size=rows, num_microbatches=count)
        case = case_of(architecture, tried, smallest)
        if _has_room(case):
            if not may_hold or on_cpu or _keeps_all(case):
                return rows * row_tokens
            fitting.append(rows)
    return max(fitting, default=1) * row_tokens


def with_smallest_card(machine: Hardware) -> Hardware:
    """The machine with only its smallest card, of which stages may fill `DEVICE_SHARE`, and any disk."""
    gpus = [device for device in machine.devices if not device.is_cpu]
    device = min(gpus or machine.devices, key=lambda one: one.memory_bytes)
    share = 1.0 if device.is_cpu else DEVICE_SHARE / FITTING_SHARE
    alone = replace(device, memory_bytes=int(share * device.memory_bytes))
    return replace(machine, devices=(alone,), disk_free_bytes=None)


def _keeps_all(case: Case) -> bool:
    """Whether the card holds all weights and the activations of a microbatch in all blocks."""
    layers = case.costs.layers
    needed = whole_cache_bytes(layers) + sum(layer.activation_bytes for layer in layers[:-1])
    return needed + fixed_device_need(case).total_bytes <= usable_device_bytes(case.hardware.devices[0])


def _has_room(case: Case) -> bool:
    kept = replace(coarsest_cut(case), microbatches_per_round=min(MICROBATCHES_KEPT, case.settings.num_microbatches))
    if not judge(case, kept).fits:
        return False
    if case.gpus:
        return True
    need = device_need(case, *even_cut(len(case.costs.layers), 1, 1))
    return need.total_bytes <= CPU_SHARE * usable_host_bytes(case.hardware)
