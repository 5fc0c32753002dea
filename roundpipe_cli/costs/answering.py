"""Layers on devices that answer: what stays there, what comes past for each token, and how long a pass takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundpipe_cli.costs.cost import NUM_SLOTS
from roundpipe_cli.costs.memory import DEVICE_ALIGNMENT_BYTES

ROOM_SHARE, ROOM_BYTES = 1.2, 512 * 1024**2
"""Memory that a model which is loaded whole takes, as a multiple of its weights and beside them: activations, keys and
values."""
WEIGHTS_SHARE = 0.8
"""Share of a device's free memory for weights, without the answers' keys and values, beside activations."""
SPREAD = 0.618034
"""Multiples of the golden ratio, without their whole part, in order: any number of the first are spread evenly."""


def roomy_device(model_bytes: int, free_bytes: Sequence[int]) -> int | None:
    """Index of the device with the most free memory, if a model of that size can answer there, whole."""
    roomy = [free for free in free_bytes if free >= ROOM_SHARE * model_bytes + ROOM_BYTES]
    return free_bytes.index(max(roomy)) if roomy else None


def weight_budget(free_bytes: int, *, answers_bytes: int, unpacked_bytes: int) -> int:
    """Bytes of a device's memory for weights: beside keys and values, and a layer's weights that are unpacked."""
    return max(0, int(WEIGHTS_SHARE * (free_bytes - answers_bytes)) - unpacked_bytes)


@dataclass(frozen=True)
class DevicePlan:
    """The layers of one device."""

    sizes: Mapping[int, int]
    """Device bytes of each, in the order in which they compute."""
    kept: frozenset[int]
    """Layers whose weights stay."""

    @property
    def kept_bytes(self) -> int:
        return sum(self.sizes[layer] for layer in self.kept)

    @property
    def passing_bytes(self) -> int:
        """Bytes that come past for each token."""
        return sum(self.sizes.values()) - self.kept_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots through which they come; of processors, of pages that the system should not need."""
        passing = [size for layer, size in self.sizes.items() if layer not in self.kept]
        return max(passing, default=0) * min(NUM_SLOTS, len(passing))


def plan_devices(layer_bytes: Sequence[int], num_devices: int, budget_bytes: int) -> list[DevicePlan]:
    """The layers of each device, and what stays there in `budget_bytes` each: large layers first, others spread evenly.

    Blocks lie on the devices in equal runs where all weights stay. Otherwise they are dealt out in turn: while one
    device computes, the links of all bring what comes next.

    Args:
        layer_bytes: one per layer, the embed layer's included, which stays on the host.
    """
    blocks = len(layer_bytes) - 2
    runs = [range(at * blocks // num_devices, (at + 1) * blocks // num_devices) for at in range(num_devices)]
    turns = [range(at, blocks, num_devices) for at in range(num_devices)]
    for dealt in (runs, turns):
        layers = [[block + 1 for block in some] for some in dealt]
        layers[-1].append(blocks + 1)
        plans = [_plan(layer_bytes, some, budget_bytes) for some in layers]
        if not any(plan.passing_bytes for plan in plans):
            break
    return plans


def _plan(layer_bytes: Sequence[int], layers: Sequence[int], budget_bytes: int) -> DevicePlan:
    sizes = {layer: -(-layer_bytes[layer] // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES for layer in layers}
    places = {layer: place for place, layer in enumerate(layers, 1)}
    left, kept = sorted(sizes, key=lambda layer: (-sizes[layer], places[layer] * SPREAD % 1)), list[int]()
    slots_bytes = [sum([sizes[one] for one in left[at + 1 : at + 2]] * NUM_SLOTS) for at in range(len(left))]
    for layer, slots in zip(left, slots_bytes, strict=True):
        if sum(sizes[one] for one in (*kept, layer)) + slots > budget_bytes:
            break
        kept.append(layer)
    return DevicePlan(sizes, frozenset(kept))


def pass_s(
    plans: Sequence[DevicePlan], compute_s: float, *, link_bytes_per_s: float, disk_bytes_per_s: float | None = None
) -> float:
    """Seconds of a pass over all layers, for one token of each prompt: their arithmetic, or what comes past meanwhile
    over the links of all devices, whichever takes longer.

    Args:
        compute_s: with all weights there; devices compute in turn.
        link_bytes_per_s: of each device.
        disk_bytes_per_s: of the disk that all weights lie on; None: they are in host memory.
    """
    copies_s = max(plan.passing_bytes for plan in plans) / link_bytes_per_s
    if disk_bytes_per_s is not None:
        copies_s = max(copies_s, sum(plan.passing_bytes for plan in plans) / disk_bytes_per_s)
    return max(compute_s, copies_s)
