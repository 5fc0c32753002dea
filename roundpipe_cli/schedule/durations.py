"""How long one action of a stage takes: the one cost function of builders, simulator and reports. Seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.schedule.actions import Kind


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of every action on a worker of speed 1, one entry per stage in execution order."""

    forward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    """0 for the first backward stage when the head is fused into it."""
    backward_s: tuple[float, ...]
    """Without recompute. The fused head stage includes the forward of its layers."""
    head_forward_s: float = 0.0
    """The part of `backward_s[0]` that is forward, when the head is fused."""
    worker_speed: tuple[float, ...] | None = None

    def action_s(self, kind: Kind, stage: int, worker: int) -> float:
        """Seconds of a compute action on its worker."""
        if kind is Kind.FORWARD:
            seconds = self.forward_s[stage]
        elif kind is Kind.RECOMPUTE:
            seconds = self.recompute_s[stage]
        else:
            seconds = self.backward_s[stage]
        return seconds if self.worker_speed is None else seconds / self.worker_speed[worker]

    def lead_s(self, stage: int, worker: int) -> float:
        """Seconds of a backward stage before it needs its gradient: the recompute, or the fused head's forward."""
        seconds = self.recompute_s[stage] + (self.head_forward_s if stage == 0 else 0.0)
        return seconds if self.worker_speed is None else seconds / self.worker_speed[worker]


def stage_times(
    costs: CostModel,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange],
    *,
    fused_head: bool,
) -> StageTimes:
    """Sum layer costs to stage costs.

    A layer's backward is preceded by its recompute, which takes the layer's forward time, where `recompute` says so
    (blocks do, the head does not).
    """
    layers = costs.layers

    def forward(stage: StageRange) -> float:
        return sum(layer.forward_s for layer in _layers_of(layers, stage))

    def backward(stage: StageRange) -> float:
        return sum(layer.backward_s for layer in _layers_of(layers, stage))

    recompute = [sum(layer.recomputed_s for layer in _layers_of(layers, stage)) for stage in backward_stages]
    backward_s = [backward(stage) for stage in backward_stages]
    head_forward_s = 0.0
    if fused_head:
        head_forward_s = forward(backward_stages[0])
        recompute[0] = 0.0
        backward_s[0] += head_forward_s
    return StageTimes(
        forward_s=tuple(forward(stage) for stage in forward_stages),
        recompute_s=tuple(recompute),
        backward_s=tuple(backward_s),
        head_forward_s=head_forward_s,
        worker_speed=costs.worker_speed,
    )


def equal_costs(num_layers: int) -> CostModel:
    """Costs in place of a cost model: each layer takes 1 forward and 2 backward, all but the last are recomputed."""
    layers = tuple(
        LayerCost(name=f"layer {index}", forward_s=1.0, backward_s=2.0, recompute=index < num_layers - 1)
        for index in range(num_layers)
    )
    return CostModel(name="equal layers", layers=layers)


def _layers_of(layers: tuple[LayerCost, ...], stage: StageRange) -> tuple[LayerCost, ...]:
    first, last = stage
    return layers[first : last + 1] if last >= first else ()
