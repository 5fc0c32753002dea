"""The work of a program's operations: the seam between the dispatcher and whoever carries operations out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.operations import Op

DispatchEvent = Any
"""A point in a device's work; None has happened."""
NOBODY = -1
"""The worker of host updates."""


class TransferChunk(NamedTuple):
    """A piece of a transfer."""

    num_bytes: int
    content: Any
    """Whatever the `Work` that made it needs to copy it."""


class AddedTransfer(NamedTuple):
    """A transfer of a boundary that a step turns out to need beside its program; fields as those of `Op`."""

    kind: Kind
    lane: str
    payload: str
    boundary: int
    priority: tuple[int, int]


class Work(Protocol):
    """The operations of one worker (or of the host), carried out."""

    lanes: tuple[str, ...]
    """Lanes that have a thread."""

    def compute_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to issue compute."""

    def lane_thread(self) -> AbstractContextManager[None]:
        """Set the current thread up to issue transfers."""

    def take_up(self, part: Any) -> None:
        """A step comes next: its compute thread calls this before any other of its threads touches the step.

        Args:
            part: what `StepRun.parts` has for this worker.
        """

    def begin(self, op: Op) -> None:
        """`op` comes next in the compute thread."""

    def run(self, op: Op, ready: Sequence[DispatchEvent], late: Sequence[DispatchEvent]) -> DispatchEvent:
        """Issue a compute operation behind its events (`late`: of `late_deps`); returns when it is done."""

    def prepare(self, op: Op, after: Sequence[DispatchEvent]) -> Sequence[TransferChunk]:
        """The chunks of a transfer whose inputs have happened; none where nothing is to be moved."""

    def copy(self, op: Op, chunk: TransferChunk) -> DispatchEvent:
        """Issue one chunk; returns when it is there."""

    def issued(self, op: Op, event: DispatchEvent) -> None:
        """All chunks of a transfer have been issued; it is there once `event` has happened."""

    def ended(self, op: Op) -> None:
        """A transfer has arrived."""

    def arrival(self, dep: Op, op: Op, event: DispatchEvent) -> DispatchEvent:
        """When what `dep` made, once `event` has happened, is there for `op`."""

    def happens_in_s(self, event: DispatchEvent) -> float:
        """0 if `event` has happened, else seconds after which to look again."""

    def happened_at_s(self, event: DispatchEvent, now_s: float) -> float:
        """When an event that has happened did so (`time.perf_counter`); `now_s` where nobody knows."""

    def where(self, op: Op, *, weights: bool) -> str:
        """The place of an error, for its message; `weights`: while waiting for the weights of `op`."""

    def drain(self) -> None:
        """Block until all issued work is done."""

    def busy_s(self) -> float:
        """Seconds for which the device is known to be busy; 0 where nobody knows."""

    def reset(self) -> None:
        """A step is over, perhaps before its end: drop what it left."""
