"""Memory of all workers of a machine without GPUs: part of the host's, with no weights and no gradient sums in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.hardware import Hardware
from roundpipe_cli.costs.memory import HEAD_CHUNK, LARGEST_GRADIENT, NeedPart, device_need
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.single_weights import block_gradient_bytes
from roundpipe_cli.costs.training import TrainingSettings
from roundpipe_cli.units import MIB

KEPT_BYTES = 64 * MIB
"""Memory of the heap that a step freed and that cannot be given back, for something lies on each of its pages: 60 to
100 MB measured beside a model of 135M parameters after each step, and none beside a tiny one: at most what it took."""


def cpu_workers_need(
    costs: CostModel,
    architecture: Architecture,
    settings: TrainingSettings,
    hardware: Hardware,
    stages: tuple[Sequence[StageRange], Sequence[StageRange]],
    microbatches_per_round: int,
) -> tuple[NeedPart, ...]:
    """Bytes of all CPU workers together at their peak.

    Stages are dealt out in turn, so no two workers compute the same one unless there are more workers than stages: only
    then does more than one hold the head's logits. A gradient of the later of the two waits for its turn to be added.

    Args:
        stages: forward and backward.
        microbatches_per_round: of a visit of a stage.
    """
    workers, (forward, backward) = sum(device.is_cpu for device in hardware.devices), stages
    at_once = math.ceil(workers / len(backward))
    head = len(costs.layers) - 1
    visits = []
    for stage in backward:
        need = device_need(costs, architecture, settings, hardware, forward, [stage])
        lacks = () if stage[1] == head else (HEAD_CHUNK, LARGEST_GRADIENT)
        of_weight = block_gradient_bytes(architecture, settings) if lacks else 0
        visits.append(of_weight + sum(part.num_bytes for part in need.parts if part.name not in lacks))
    visits = sorted(visits * at_once, reverse=True)[:workers]
    waiting = (at_once - 1) * microbatches_per_round * sum(layer.grad_bytes for layer in costs.layers)
    return (
        NeedPart(f"{workers} CPU workers", sum(visits)),
        NeedPart("heap that the C library keeps", min(KEPT_BYTES, sum(visits))),
        *([NeedPart("gradients that wait for their turn", waiting)] if waiting else []),
    )
