"""Input and result of an engine's step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from roundpipe_cli.model.distillation import TeacherScores
from roundpipe_cli.model.head import target_rows
from roundpipe_cli.model.sequence_loss import Preference
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, WEIGHTS
from roundpipe_cli.schedule.timeline import UP, Interval, Timeline, bubble_ratio, utilization


@dataclass(frozen=True)
class Microbatch:
    """One forward unit of work, on the host."""

    input_ids: torch.Tensor
    """int64 [B, T], padded on the right."""
    labels: torch.Tensor
    """int64 [B, T]; -100 where nothing is trained. The loss at t is for label t + 1."""
    position_ids: torch.Tensor | None = None
    """int64 [B, T], restarting with each of the packed rows of a sequence; None: the model counts from 0."""
    preference: Preference | None = None
    """Sequences are scored as wholes, side by side of their rows; None: the loss is that of the target tokens."""
    lengths: torch.Tensor | None = None
    """int64 [B]: tokens of each sequence without padding, for the routers' loss; None: all."""
    weights: torch.Tensor | None = None
    """float32 [B, T]: factor of each label's loss, 0 or more; None: 1."""
    teacher: TeacherScores | None = None
    """Figures of the target tokens, in the order of `target_rows`; None: the loss is cross entropy alone."""

    @property
    def num_units(self) -> float:
        """Number by whose sum over the step the loss is divided: of rows that are scored as wholes, else of target
        tokens, or the sum of their weights."""
        if self.preference is not None:
            return self.preference.num_rows(len(self.labels))
        indices, _ = target_rows(self.labels)
        return len(indices) if self.weights is None else float(self.weights.flatten()[indices + 1].double().sum())


@dataclass(frozen=True)
class Part:
    """The microbatches of a step that this engine computes, where other machines compute the others."""

    first: int
    """Index of the first one in the step."""
    num_units: float
    """Sum over all machines' microbatches."""


@dataclass(frozen=True)
class StepResult:
    """Result of one step. The gradients are in the weight store."""

    loss: float
    """Mean loss of the step's target tokens, or of its rows."""
    num_target_tokens: int
    gradient_norm: float
    """2-norm of the gradient of `loss`: root of per-layer float64 sums of squares, in layer order."""
    step_s: float
    """Seconds of forward and backward until the gradients are complete, without the optimizer."""
    actions: tuple[Interval, ...]
    """The computations with their measured times; all figures come from them."""
    num_workers: int
    moved_bytes: Mapping[tuple[str, str], int]
    """Bytes of transfers by (`up` or `down`, payload)."""
    device_peak_bytes: tuple[int, ...]
    """Per worker, the peak of memory in use."""
    device_reserved_bytes: tuple[int, ...] = ()
    """Per worker, the peak of memory that the allocator held: more than in use, where it has gaps."""
    launch_bound_s: tuple[float, ...] = ()
    """Per worker, seconds of operations in which a GPU may have waited for launches."""
    started_s: float = 0.0
    """Start by `time.perf_counter`."""
    part_sums: tuple[tuple[float, ...], ...] = ()
    """`HeadResult.part_sums` of each microbatch, where the loss has parts."""
    fused_head: bool = True
    """Whether the head was fused into the first backward stage, as the schedule says."""
    links: tuple[Interval, ...] = ()
    """The transfers in the order in which they arrived; none where workers read host memory in place. Each lasts from
    the issue of its first chunk until a lane's thread has seen that its last one is there: on a GPU up to a millisecond
    late."""
    waits: tuple[Interval, ...] = ()
    """Waits of workers for updates of the weights that they needed next."""
    lanes: tuple[int, ...] = ()
    """Each worker's number when the run began: those of lost devices are missing."""
    notices: tuple[str, ...] = ()
    """Notes on the devices for the user; each once in a run."""

    @property
    def timeline(self) -> Timeline:
        """The computations with their measured times; all figures come from them. `links` has the transfers."""
        return Timeline(self.num_workers, self.actions, fused_head=self.fused_head)

    @property
    def upload_bytes(self) -> int:
        """Weights and gradient sums that went up to the devices."""
        return sum(self.moved_bytes.get((UP, payload), 0) for payload in (WEIGHTS, WEIGHT_GRADIENT))

    @property
    def utilization(self) -> tuple[float, ...]:
        """Per worker, the share of the step that it computed."""
        return tuple(utilization(self.timeline))

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (workers x makespan)."""
        return bubble_ratio(self.timeline)

    @property
    def launch_bound_ratio(self) -> float:
        """Share of the workers' busy time in which a GPU may have waited for launches."""
        busy = sum(item.end_s - item.start_s for item in self.actions)
        return min(1.0, sum(self.launch_bound_s) / busy) if busy else 0.0
