"""The values of `auto`: tokens of a microbatch, and how often packed weights are unpacked; for `plan` and a run alike.

    rows of max_seq_length tokens     1     2     4     8       the largest count is taken
    tokens                         2048  4096  8192 16384       that the card has room for
    microbatches of a full step      64    32    16     8       and that leaves enough microbatches

Neither the number of workers nor that of machines is asked for, so that a run's microbatches, and with them its bits,
are the same on one such card and on eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.choices import PACKED_FORMATS, SCHEDULE_KINDS
from roundpipe_cli.costs.analytic import Case, case_of
from roundpipe_cli.costs.cost import StageRange
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
from roundpipe_cli.planning.choose import given_cut
from roundpipe_cli.planning.search.ranges import even_cut, even_stages
from roundpipe_cli.planning.verdict import coarsest_cut, judge, judge_coarsest, worker_budget_bytes
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.units import format_bytes

USUAL_TOKENS = 8192
"""Tokens with which products take longer than launches and uploads of weights (rule of thumb)."""
EXPERT_TOKENS = 16384
"""The same for models whose experts each get a small share of the tokens."""
CPU_TOKENS = 2048
"""The same for the processor, which fetches no weights."""
MIN_MICROBATCHES = 4
"""A step keeps at least so many microbatches, whatever the number of workers, of full rows as of short ones."""
MIN_LARGE_MICROBATCHES = 16
"""The same where a microbatch has more than `USUAL_TOKENS`."""
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


# How often packed weights (4 bit, 8 bit, FP8) are unpacked: the one answer for `plan`, `bench` and a run. No torch.
#
#     once per visit      a visit begins          all microbatches pass            it ends
#                         its blocks unpacked ... and stay so ...................  dropped
#     otherwise           each block for each microbatch, in forward, recompute and backward
#
# The same bits either way. Once per visit saves time and takes memory: that of a stage's unpacked weights in place of
# one block's. Stages are then cut smaller, so memory allows it wherever stages of one block fit; and the host has to
# have room for the boundaries of so many stages.


@dataclass(frozen=True, slots=True)
class Unpacking:
    """The decision, and what prevents unpacking once per visit."""

    label: str
    """Name of the format, for the user."""
    once: bool
    """Once per visit of a stage; otherwise for each microbatch and pass."""
    lacking: str = ""
    """Memory that is missing for once per visit, such as `3 GiB of GPU memory`."""

    def describe(self) -> str:
        """A line for the user."""
        what = f"{self.label.replace(' ', '-')} weights are unpacked"
        if self.once:
            return f"{what} once per visit of a stage"
        return f"{what} for each microbatch and pass" + (f", for lack of {self.lacking}" if self.lacking else "")


def choose_unpacking(case: Case, pipeline: PipelineConfig) -> tuple[Unpacking | None, Case]:
    """How packed weights are unpacked, None where there are none; and the case with the settings and costs of that.

    Args:
        case: with settings as they are apart from this decision.
        pipeline: the recipe's section, which may give the stages.
    """
    settings, machine = case.settings, case.hardware
    if not settings.packed_bytes_per_param or settings.packed_as is None:
        return None, case
    label = PACKED_FORMATS[settings.packed_as].label
    once = case_of(case.architecture, replace(settings, unpacks_once=True), machine)
    needed = device_need(once, *_least_stages(pipeline, len(once.costs.layers), len(machine.devices))).total_bytes
    sizes = [device.memory_bytes for device in case.gpus]
    lacking = needed - (int(DEVICE_SHARE * min(sizes)) if sizes else worker_budget_bytes(once))
    if lacking > 0:
        return Unpacking(label, False, f"{format_bytes(lacking)} of {'GPU' if sizes else 'host'} memory"), case
    verdict = judge_coarsest(once)
    if verdict.fits:
        return Unpacking(label, True), once
    if not judge_coarsest(case).fits:
        return Unpacking(label, False), case
    over = max(verdict.host.total_bytes, verdict.loading.total_bytes) - usable_host_bytes(machine)
    return Unpacking(label, False, f"{format_bytes(max(0, over))} of host memory"), case


def _least_stages(
    pipeline: PipelineConfig, num_layers: int, num_workers: int
) -> tuple[Sequence[StageRange], Sequence[StageRange]]:
    """The stages that need least device memory: the recipe's own, or the smallest of its schedule."""
    given = given_cut(pipeline, num_workers)
    if given is not None:
        return given.forward_stages, given.backward_stages
    if SCHEDULE_KINDS[pipeline.schedule].one_stage_each:
        stages = even_stages(num_layers, num_workers)
        return stages, tuple(reversed(stages))
    return even_cut(num_layers, 1, 1)
