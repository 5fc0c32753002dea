"""Whether a run fits: its needs against the machine's memories, and which memory is short by how much."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.costs.analytic import AnalyticCosts, analytic_costs
from roundpipe_cli.costs.hardware import Device, Hardware
from roundpipe_cli.costs.memory import (
    DEVICE_SHARE,
    Need,
    NeedPart,
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
from roundpipe_cli.costs.models import Architecture, TrainingSettings
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.search.stages import StageLimits, even_cut, limits_for
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


def judge(
    architecture: Architecture,
    settings: TrainingSettings,
    hardware: Hardware,
    analytic: AnalyticCosts,
    *,
    cut: StageCut,
) -> Verdict:
    """The verdict on one cut of the layers into stages, and on the rounds that it has."""
    assert cut.microbatches_per_round is not None
    costs = analytic.costs
    device = device_need(costs, architecture, settings, hardware, cut.forward_stages, cut.backward_stages)
    stages = len(cut.forward_stages), len(cut.backward_stages)
    head_bytes, waiting_bytes = _waiting_bytes(settings, hardware, analytic, cut)
    if head_bytes:
        device = Need((*device.parts, NeedPart("a gradient of the head on its way to the host", head_bytes)))
    per_round = cut.microbatches_per_round
    host = host_need(costs, architecture, settings, hardware, stages, per_round, waiting_bytes=waiting_bytes)
    if any(one.is_cpu for one in hardware.devices):
        of_stages = cut.forward_stages, cut.backward_stages
        needs = (costs, architecture, settings, hardware, of_stages, cut.microbatches_per_round)
        host = Need((*host.parts, *cpu_workers_need(*needs)))
    loading, disk = loading_need(architecture, settings), disk_need(architecture, settings)
    reasons = [_device_reason(device, one) for one in _smallest_device(hardware)]
    most = max(host, loading, key=lambda need: need.total_bytes)
    reasons.append(_reason("host memory", most, usable_host_bytes(hardware), hardware.host_memory_bytes))
    if hardware.disk_free_bytes is not None:
        reasons.append(_reason("disk", disk, hardware.disk_free_bytes, hardware.disk_free_bytes))
    return Verdict(device, host, loading, disk, tuple(reason for reason in reasons if reason is not None))


def _waiting_bytes(
    settings: TrainingSettings, hardware: Hardware, analytic: AnalyticCosts, cut: StageCut
) -> tuple[int, int]:
    """Gradients of stages that several GPUs share: of a trained head on a device while another one is computed, and of
    all that wait in the host's memory for their turn to be added."""
    dealing, workers = cut.dealing, len(hardware.devices)
    if dealing is None or any(one.is_cpu for one in hardware.devices):
        return 0, 0
    if dealing.splits_stages:  # of each worker but one, all that it trains
        return 0, (workers - 1) * analytic.trainable_params * settings.dtype_bytes
    head_bytes = analytic.costs.layers[-1].grad_bytes if dealing.head_workers > 1 else 0
    return head_bytes, min(dealing.head_workers, workers) * head_bytes


def judge_coarsest(
    architecture: Architecture, settings: TrainingSettings, hardware: Hardware, analytic: AnalyticCosts | None = None
) -> Verdict:
    """The verdict on the coarsest even cut that the devices hold, in the shortest rounds: what does not fit so never
    fits.

    Larger stages need more device memory and, with fewer boundaries to keep, less host memory.

    Args:
        analytic: costs of such microbatches, where they are known; what memory holds does not change them.
    """
    analytic = analytic or analytic_costs(architecture, settings, hardware)
    return judge(
        architecture, settings, hardware, analytic, cut=coarsest_cut(architecture, settings, hardware, analytic)
    )


def coarsest_cut(
    architecture: Architecture, settings: TrainingSettings, hardware: Hardware, analytic: AnalyticCosts
) -> StageCut:
    """Stages of as many blocks each as the devices hold, one block each if not even two fit; the shortest rounds."""
    num_layers = len(analytic.costs.layers)
    budget = worker_budget_bytes(architecture, settings, hardware, analytic)
    low, high = 1, num_layers - 1
    while low < high:  # device memory grows with the blocks of a stage
        blocks = (low + high + 1) // 2
        stages = even_cut(num_layers, blocks, blocks)
        need = device_need(analytic.costs, architecture, settings, hardware, *stages)
        if need.total_bytes <= budget:
            low = blocks
        else:
            high = blocks - 1
    return StageCut(*even_cut(num_layers, low, low), len(hardware.devices))


def worker_budget_bytes(
    architecture: Architecture, settings: TrainingSettings, hardware: Hardware, analytic: AnalyticCosts
) -> int:
    """Bytes that a worker may use: of the smallest GPU, since every stage must run on every worker; for CPU workers
    their share of the host memory that is left when all else is counted, with rounds of two microbatches a worker."""
    gpus = _smallest_device(hardware)
    if gpus:
        return usable_device_bytes(gpus[0])
    host_bytes = _finest_host_bytes(architecture, settings, hardware, analytic, per_round=2 * len(hardware.devices))
    return max(0, usable_host_bytes(hardware) - host_bytes) // len(hardware.devices)


def _finest_host_bytes(
    architecture: Architecture,
    settings: TrainingSettings,
    hardware: Hardware,
    analytic: AnalyticCosts,
    *,
    per_round: int,
) -> int:
    """The host's need with one layer a stage, which keeps the most boundaries."""
    count = len(analytic.costs.layers)
    return host_need(analytic.costs, architecture, settings, hardware, (count, count), per_round).total_bytes


def _smallest_device(hardware: Hardware) -> list[Device]:
    """The GPU with least memory, if any: every stage must run on every worker. CPU workers share the host's memory."""
    gpus = [device for device in hardware.devices if not device.is_cpu]
    return sorted(gpus, key=lambda device: device.memory_bytes)[:1]


def _device_reason(need: Need, device: Device) -> str | None:
    return _reason(f"memory of {device.name}", need, usable_device_bytes(device), device.memory_bytes)


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


def stage_limits(
    architecture: Architecture, settings: TrainingSettings, hardware: Hardware, analytic: AnalyticCosts
) -> StageLimits:
    """Limits for the planner under which every cut fits the devices. How long rounds may be depends on the cut: `judge`
    says it."""
    gpus = _smallest_device(hardware)
    budget = worker_budget_bytes(architecture, settings, hardware, analytic)
    free = int(DEVICE_SHARE * gpus[0].memory_bytes) if gpus else budget
    free -= fixed_device_need(analytic.costs, architecture, settings, hardware).total_bytes
    head = beyond_margin(head_gradient_bytes(analytic.costs, settings), gpus[0].memory_bytes) if gpus else 0
    return limits_for(analytic.costs, free, head_gradient_bytes=head)
