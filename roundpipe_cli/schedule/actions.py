"""A schedule is data: for each worker, the list of actions that it carries out, in order.

An action is one item of that list. Its text form is `<stage><kind><microbatch>`, for instance `2F0`: the forward of
stage 2 for microbatch 0. Forward stages and backward stages are numbered separately, each in execution order: backward
stage 0 runs first and holds the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roundpipe_cli.costs.cost import StageRange


class Kind(str, Enum):
    """The kind of work that an action does."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    UPLOAD = "U"
    DOWNLOAD = "D"
    OPTIMIZER = "O"


@dataclass(frozen=True, slots=True)
class Action:
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
