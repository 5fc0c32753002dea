"""A schedule is data: for each worker, the actions that it carries out, in order; and how long each takes.

An action is one item of that list. Its text form is `<stage><kind><microbatch>`, for instance `2F0`: the forward of
stage 2 for microbatch 0. Forward stages and backward stages are numbered separately, each in execution order: backward
stage 0 runs first and holds the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange


class Kind(str, Enum):
    """The kind of work that an action does."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    UPLOAD = "U"
    DOWNLOAD = "D"
    OPTIMIZER = "O"


FORWARD, RECOMPUTE, BACKWARD = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
"""By names of their own: to look up a member of an enumeration takes a simulation a third of its time."""


class Action(NamedTuple):
    """One item of a schedule."""

    kind: Kind
    stage: int
    """Index of the forward stage (F) or of the backward stage (R, B), in execution order."""
    microbatch: int
    """Index of the microbatch within the schedule, over all of its rounds and chained steps."""
    worker: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def in_backward_order(microbatch: int, sequence_chunks: int) -> int:
    """Sequence after sequence, each from its last chunk to its first: place of a microbatch, or which is at a place."""
    chunk = microbatch % sequence_chunks
    return microbatch + sequence_chunks - 1 - 2 * chunk


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order, for one step or several chained steps."""

    name: str
    num_workers: int
    num_microbatches: int
    """Microbatches per step."""
    forward_stages: tuple[StageRange, ...]
    """Layer ranges in execution order. Leaves out what the first backward stage computes itself when `fused_head`."""
    backward_stages: tuple[StageRange, ...]
    """Layer ranges in execution order: the one with the head first."""
    fused_head: bool
    """True: backward stage 0 runs forward and backward of its layers without recompute (roundpipe). False: the head's
    forward belongs to the last forward stage, whose activations are kept for nothing but the head."""
    actions: tuple[tuple[Action, ...], ...]
    """Per worker: F, R and B actions in execution order. R of a (stage, microbatch) directly precedes its B."""
    microbatches_per_round: int
    num_steps: int = 1
    """Chained steps; microbatch m belongs to step m // num_microbatches."""
    sequence_chunks: int = 1
    """So many consecutive microbatches are the chunks of one sequence: a stage with blocks takes them in order forward,
    because a chunk's attention sees the ones before, and in reverse order backward."""

    def backward_place(self, stage: int, microbatch: int) -> int:
        """Place of a microbatch in the order of a backward stage, and just as well the microbatch at a place.

        A stage with the head alone takes them in ascending order.
        """
        if self.fused_head and stage == 0:
            return microbatch
        return in_backward_order(microbatch, self.sequence_chunks)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(action) for action in row) for row in self.actions)


# How long one action of a stage takes: the one cost function of builders, simulator and reports. Seconds.


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
        if kind is FORWARD:
            seconds = self.forward_s[stage]
        elif kind is RECOMPUTE:
            seconds = self.recompute_s[stage]
        else:
            seconds = self.backward_s[stage]
        return seconds if self.worker_speed is None else seconds / self.worker_speed[worker]

    def lead_s(self, stage: int, worker: int) -> float:
        """Seconds of a backward stage before it needs its gradient: the recompute, or the fused head's forward."""
        seconds = self.recompute_s[stage] + (self.head_forward_s if stage == 0 else 0.0)
        return seconds if self.worker_speed is None else seconds / self.worker_speed[worker]


def stage_times(
    costs: CostModel, forward_stages: Sequence[StageRange], backward_stages: Sequence[StageRange], *, fused_head: bool
) -> StageTimes:
    """Sum layer costs to stage costs.

    A layer's backward is preceded by its recompute, which takes the layer's forward time, where `recompute` says so
    (blocks do, the head does not).
    """

    def layers_of(stage: StageRange) -> tuple[LayerCost, ...]:
        return costs.layers[stage[0] : stage[1] + 1]

    def forward(stage: StageRange) -> float:
        return sum(layer.forward_s for layer in layers_of(stage))

    recompute = [sum(layer.recomputed_s for layer in layers_of(stage)) for stage in backward_stages]
    backward_s = [sum(layer.backward_s for layer in layers_of(stage)) for stage in backward_stages]
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
