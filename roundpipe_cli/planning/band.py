"""Uncertainty of a predicted step time, by what the prediction is based on."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.costs.hardware import Hardware
from roundpipe_cli.costs.models import Architecture, TrainingSettings

GROUPED_PRODUCTS = ("h100", "h800", "h200", "h20", "b200")
"""Starts of the names of GPUs for which torch has grouped products of its own (sm90, sm100)."""


@dataclass(frozen=True, slots=True)
class Band:
    """A range around a prediction."""

    factor: float
    """Above 1: from the prediction divided by it to the prediction times it."""
    why: str

    def around(self, value: float) -> tuple[float, float]:
        """(least, most), in `value`'s unit."""
        return value / self.factor, value * self.factor


MEASURED = Band(1.15, "from layer times that this run measured")
ON_CPU = Band(3.0, "rates of a processor are assumed")
# No GPU was measured by us yet. Published full fine-tuning of two models on 1 to 8 RTX 4090s lies within 4 % of the
# cost model (tests/costs); everything else is scaled from there by data sheets.
PUBLISHED_GPU = "rtx-4090"
FULL = Band(1.2, "full fine-tuning from data sheets")
FULL_ELSEWHERE = Band(1.3, "full fine-tuning from data sheets")
LORA = Band(1.3, "LoRA from data sheets")
EXPERTS = Band(1.3, "experts from data sheets")
EXPERTS_BY_OWN_KERNELS = Band(1.5, "experts, kernels not measured")


def band_of(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> Band:
    """The band of a prediction that uses no measurement of this machine."""
    if any(device.is_cpu for device in hardware.devices):
        return ON_CPU
    if architecture.num_experts_per_tok:
        has_own = all(device.name.startswith(GROUPED_PRODUCTS) for device in hardware.devices)
        return EXPERTS if has_own else EXPERTS_BY_OWN_KERNELS
    if settings.method == "lora":
        return LORA
    return FULL if all(device.name == PUBLISHED_GPU for device in hardware.devices) else FULL_ELSEWHERE
