"""State that the threads of one step share."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.engine.activations import BoundaryStore, MicrobatchState
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.gradients import StepGradients
from roundpipe_cli.engine.prepared import PreparedProgram
from roundpipe_cli.model.head import HeadLoss
from roundpipe_cli.schedule.program import Program


@dataclass(frozen=True)
class Scoring:
    """A pass without backward, dropout or gradients."""

    adapters: bool = True
    """False: only the base model computes, without adapters."""
    greedy: bool = False
    """Also return the most probable token at each target's place."""


@dataclass(frozen=True)
class StepContext:
    """One step: its program, its microbatches and where its results go."""

    step: int
    version: int
    """Version of the weights that the whole step reads, the embedding's rows included."""
    prepared: PreparedProgram
    microbatches: list[MicrobatchState]
    num_units: int
    """Number of the step's target tokens, or pairs: the loss is their mean."""
    loss: HeadLoss
    """How the loss is computed; its gradient scale is the step's loss scale / `num_units`."""
    dropout_seed: int
    """The run's seed."""
    seeds_blocks: bool
    """Watch blocks for calls of random functions; False: they are known to call none."""
    progress: Progress
    boundaries: BoundaryStore
    gradients: StepGradients
    scoring: Scoring | None = None
    """None in a training step."""

    @property
    def program(self) -> Program:
        return self.prepared.program
