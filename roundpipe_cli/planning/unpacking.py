"""How often packed weights (4 bit, 8 bit, FP8, MXFP4) are unpacked: the one answer for `plan`, `bench` and a run.

    once per visit      a visit begins          all microbatches pass            it ends
                        its blocks unpacked ... and stay so ...................  dropped
    otherwise           each block for each microbatch, in forward, recompute and backward

The same bits either way. Once per visit saves time and takes memory: that of a stage's unpacked weights in place of
one block's. Stages are then cut smaller, so memory allows it wherever stages of one block fit; and the host has to
have room for the boundaries of so many stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.choices import PACKED_FORMATS, SCHEDULE_KINDS, PackedName
from roundpipe_cli.costs.analytic import Case, case_of
from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.costs.memory import DEVICE_SHARE, device_need, usable_host_bytes
from roundpipe_cli.planning.choose import given_cut
from roundpipe_cli.planning.search.ranges import even_cut, even_stages
from roundpipe_cli.planning.verdict import judge_coarsest, worker_budget_bytes
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.units import format_bytes


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


def assumed_rate(packed_as: PackedName | None) -> Iterator[str]:
    """A line on the rate at which a GPU unpacks a format, where one was not measured so."""
    if packed_as == "fp8":
        yield "assumed: FP8 weights (load_in_fp8) are unpacked at 0.26 of the memory's rate, as on an H100"
    if packed_as is not None and PACKED_FORMATS[packed_as].is_published:
        yield (
            f"assumed: weights in {PACKED_FORMATS[packed_as].label} are unpacked by one kernel (Triton's, on sm80 or "
            "newer) that reads and writes each once, at the memory's rate; not measured"
        )


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
