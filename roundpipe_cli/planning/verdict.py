"""Whether a run fits: its needs against the machine's memories, and which memory is short by how much."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from roundpipe_cli.costs.analytic import Case
from roundpipe_cli.costs.hardware import Device
from roundpipe_cli.costs.memory import (
    DEVICE_SHARE,
    Need,
    beyond_margin,
    cpu_workers_need,
    device_need,
    disk_need,
    fixed_device_need,
    head_gradient_bytes,
    host_need,
    loading_need,
    usable_device_bytes,
    usable_host_bytes,
)
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.search.stages import StageLimits, limits_for
from roundpipe_cli.units import format_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Needs of a run in each memory, and the reasons why it does not fit."""

    device: Need
    """Need of one worker."""
    host: Need
    """Need of the host at the peak of a step."""
    loading: Need
    """Need of the host at its peak while the model is loaded."""
    disk: Need
    reasons: tuple[str, ...]
    """Reasons why the run does not fit; empty: it fits."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def short_reasons(self) -> tuple[str, ...]:
        """The reasons, without the parts of each need."""
        return tuple(reason.partition(". Needed are")[0] for reason in self.reasons)


def has_room(case: Case, verdict: Verdict) -> bool:
    """Whether the needs in `verdict` leave free on each GPU the margin for what no memory model knows."""
    sizes = [device.memory_bytes for device in case.gpus]
    return verdict.fits and (not sizes or verdict.device.total_bytes <= DEVICE_SHARE * min(sizes))


def judge(case: Case, cut: StageCut) -> Verdict:
    """The verdict on one cut of the layers into stages, and on the rounds that it has."""
    assert cut.microbatches_per_round is not None
    settings, hardware = case.settings, case.hardware
    device = device_need(case, cut.forward_stages, cut.backward_stages, cut.microbatches_per_round)
    head_bytes, waiting_bytes = _waiting_bytes(case, cut)
    device = Need({**device.parts, "a gradient of the head on its way to the host": head_bytes})
    per_round, stages = cut.microbatches_per_round, (len(cut.forward_stages), len(cut.backward_stages))
    host = host_need(case, stages, per_round, waiting_bytes=waiting_bytes)
    if len(case.gpus) < len(hardware.devices):
        of_workers = cpu_workers_need(case, (cut.forward_stages, cut.backward_stages), per_round)
        host = Need({**host.parts, **of_workers})
    loading, disk = loading_need(case.architecture, settings), disk_need(case.architecture, settings)
    reasons = [
        _reason(f"memory of {one.name}", device, usable_device_bytes(one), one.memory_bytes)
        for one in _smallest_device(case)
    ]
    most = max(host, loading, key=lambda need: need.total_bytes)
    reasons.append(_reason("host memory", most, usable_host_bytes(hardware), hardware.host_memory_bytes))
    if hardware.disk_free_bytes is not None:
        reasons.append(_reason("disk", disk, hardware.disk_free_bytes, hardware.disk_free_bytes))
    return Verdict(device, host, loading, disk, tuple(filter(None, reasons)))


def _waiting_bytes(case: Case, cut: StageCut) -> tuple[int, int]:
    """Gradients of stages that several GPUs share: of a trained head on a device while another one is computed, and of
    all that wait in the host's memory for their turn to be added."""
    dealing, workers = cut.dealing, len(case.hardware.devices)
    if dealing is None or len(case.gpus) < workers:
        return 0, 0
    if dealing.splits_stages:  # of each worker but one, all that it trains
        return 0, (workers - 1) * case.trainable_params * case.settings.dtype_bytes
    head_bytes = case.costs.layers[-1].grad_bytes if dealing.head_workers > 1 else 0
    return head_bytes, min(dealing.head_workers, workers) * head_bytes


def judge_coarsest(case: Case) -> Verdict:
    """The verdict on the coarsest even cut that the devices hold, in the shortest rounds: what does not fit so never
    fits.

    Larger stages need more device memory and, with fewer boundaries to keep, less host memory.
    """
    return judge(case, coarsest_cut(case))


def coarsest_cut(case: Case) -> StageCut:
    """Stages of as many blocks each as the devices hold, one block each if not even two fit; the shortest rounds."""
    num_layers, budget = len(case.costs.layers), worker_budget_bytes(case)

    def exceeds(blocks: int) -> bool:
        return device_need(case, *even_cut(num_layers, blocks, blocks)).total_bytes > budget

    most = max(1, bisect_left(range(1, num_layers), True, key=exceeds))  # device memory grows with a stage's blocks
    return StageCut(*even_cut(num_layers, most, most), len(case.hardware.devices))


def worker_budget_bytes(case: Case) -> int:
    """Bytes that a worker may use: of the smallest GPU, since every stage must run on every worker; for CPU workers
    their share of the host memory that is left when all else is counted, with rounds of two microbatches a worker and
    one layer a stage, which keeps the most boundaries."""
    gpus = _smallest_device(case)
    if gpus:
        return usable_device_bytes(gpus[0])
    count, workers = len(case.costs.layers), len(case.hardware.devices)
    host_bytes = host_need(case, (count, count), 2 * workers).total_bytes
    return max(0, usable_host_bytes(case.hardware) - host_bytes) // workers


def _smallest_device(case: Case) -> list[Device]:
    """The GPU with least memory, if any: every stage must run on every worker. CPU workers share the host's memory."""
    return sorted(case.gpus, key=lambda device: device.memory_bytes)[:1]


def _reason(what: str, need: Need, usable_bytes: int, total_bytes: int) -> str | None:
    """None if the need is met; otherwise which memory is short, and by how much."""
    over = need.total_bytes - usable_bytes
    if over <= 0:
        return None
    usable = "" if usable_bytes == total_bytes else f" ({format_bytes(usable_bytes)} of it usable)"
    return (
        f"{what}: needs {format_bytes(need.total_bytes)}, has {format_bytes(total_bytes)}{usable}: "
        f"{format_bytes(over)} too little. Needed are {need.describe()}"
    )


def stage_limits(case: Case) -> StageLimits:
    """Limits for the planner under which every cut fits the devices. How long rounds may be depends on the cut: `judge`
    says it."""
    gpus = _smallest_device(case)
    free = int(DEVICE_SHARE * gpus[0].memory_bytes) if gpus else worker_budget_bytes(case)
    free -= fixed_device_need(case).total_bytes
    head = beyond_margin(head_gradient_bytes(case.costs, case.settings), gpus[0].memory_bytes) if gpus else 0
    return limits_for(case.costs, free, head_gradient_bytes=head)
