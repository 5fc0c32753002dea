"""The largest single weights of a block, which exist twice for a moment: while they are filled, and as gradients."""

from __future__ import annotations

from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.training import TrainingSettings


def block_gradient_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Gradient of a block's largest trained weight, which exists whole before it is added to its sum: of the
    feed-forward part, where all experts' gates and what they multiply may be one."""
    if settings.method == "lora":
        return 0  # of a rank
    matrix = architecture.hidden_size * architecture.intermediate_size * settings.dtype_bytes
    return max(matrix, converted_bytes(architecture, settings))


def converted_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Size of the largest weight that is made of several tensors of the files: the experts' gates and what they
    multiply, fused."""
    experts = max((block.mlp_params for block in architecture.blocks if block.num_experts), default=0)
    share = 2 / 3 if architecture.gated_mlp else 1 / 2
    return int(experts * share) * settings.dtype_bytes
