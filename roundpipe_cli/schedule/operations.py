"""A lowered program as plain data: operations, visits of stages, and the program of both. See `lower.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.schedule.actions import Kind, Schedule

WEIGHTS, ACTIVATION, GRADIENT, WEIGHT_GRADIENT = "weights", "activation", "gradient", "weight gradient"
"""Loads of a transfer. `GRADIENT` is the gradient of a boundary tensor."""

URGENT, NEXT, SAVED, LAST = 0, 1, 2, 3
"""First part of a priority: what unblocks compute; weights, by visit; what a recompute reads; weight gradients."""


class Op(NamedTuple):
    """One operation of a program. Bytes; indices as in `Action`; -1 where something does not apply."""

    id: int
    kind: Kind
    lane: str
    worker: int
    """-1 for updates, which run on the host."""
    stage: int
    """Forward stage for F, backward stage for R and B; a transfer has that of the compute operation it belongs to; an
    update has its layer, or -1 for the gate that waits for the step's gradients."""
    microbatch: int
    step: int
    payload: str
    num_bytes: int
    visit: int
    """Index into `Program.visits`."""
    priority: tuple[int, int]
    deps: list[int]
    late_deps: list[int]
    boundary: int = -1
    """A transfer carries the hidden states at the input of this layer, or their gradient."""


@dataclass(slots=True)
class Visit:
    """A worker's stay on one range of layers."""

    worker: int
    layers: StageRange
    step: int
    slot: int
    num_bytes: int
    """Bytes of weights and gradient accumulators in the slot."""
    ops: list[int] = field(default_factory=list)
    """Compute operations, in order."""
    upload: int = -1
    downloads: list[int] = field(default_factory=list)
    """Downloads of gradient sums: one, or where they are added up on the host one for each backward."""


@dataclass(frozen=True)
class Program:
    """A lowered schedule."""

    schedule: Schedule
    ops: list[Op]
    compute: list[list[int]]
    """Per worker: ids of F, R and B in order."""
    visits: list[Visit]
    staleness: int
    host_folded: frozenset[StageRange] = frozenset()
    """Backward stages whose visits do not follow each other microbatch by microbatch, because several workers share
    them, or share a round of them: each microbatch's gradients go down by themselves and are added up on the host, in
    order."""
