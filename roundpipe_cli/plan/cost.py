"""What each layer costs: the one input of planner and simulator. Seconds and bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Costs of one layer for one microbatch on a worker of speed 1."""

    name: str
    """`embed`, `block.3` or `head`."""
    forward_s: float
    backward_s: float
    """Without recompute."""
    recompute: bool
    """Whether its backward is preceded by a recompute that takes `forward_s`."""
    param_bytes: int = 0
    """Bytes uploaded per stage visit; 0 means that uploads are free."""
    boundary_bytes: int = 0
    """Bytes of the hidden states that this layer passes on, one microbatch."""
    grad_bytes: int = 0
    """Bytes of the gradient accumulators, downloaded after a backward visit."""
    optimizer_s: float = 0.0
    """Host seconds of one optimizer update of this layer."""
    activation_bytes: int = 0
    """Bytes kept on the device between recompute and backward of one microbatch."""
    recompute_skippable_s: float = 0.0
    """Part of the recompute that can be left out because backward never reads its result."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """All that planner and simulator know about a model on a machine."""

    name: str
    layers: tuple[LayerCost, ...]
    """In order; `head` is last, `embed` (optional) first."""
    hop_s: float = 0.0
    """Latency of a boundary between two different workers."""
    link_bytes_per_s: float = 25e9
    """Of each worker's host link, each direction."""
    device_memory_bytes: int | None = None
    slots: int = 2
    worker_speed: tuple[float, ...] | None = None
    """Relative speed per worker; None means all 1.0."""
