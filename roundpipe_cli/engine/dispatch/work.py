"""The interface between the dispatcher and the code that carries operations out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from roundpipe_cli.schedule.program import Op

DispatchEvent = Any
"""A point in a device's work; None: it has already happened."""
NOBODY = -1
"""In place of a worker, for the host's updates."""


class TransferChunk(NamedTuple):
    """A piece of a transfer."""

    num_bytes: int
    content: Any
    """Data that the `Work` that made the chunk needs to copy it."""


class Work(Protocol):
    """Carries out the operations of one worker."""

    lanes: tuple[str, ...]
    """Lanes that have a thread."""

    def compute_thread(self) -> AbstractContextManager[None]:
        """Prepare the current thread for issuing compute operations."""

    def lane_thread(self) -> AbstractContextManager[None]:
        """Prepare the current thread for issuing transfers."""

    def begin_part(self, part: Any) -> None:
        """Begin a step; the compute thread calls this before any other thread of the worker touches the step.

        Args:
            part: what `StepRun.parts` has for this worker.
        """

    def run(self, op: Op, ready: Sequence[DispatchEvent], late: Sequence[DispatchEvent]) -> DispatchEvent:
        """Issue a compute operation behind its events (`late`: of `late_deps`); returns the event of its end."""

    def prepare(self, op: Op, after: Sequence[DispatchEvent]) -> Sequence[TransferChunk]:
        """The chunks of a transfer whose inputs have happened; none where nothing is to be moved."""

    def copy(self, op: Op, chunk: TransferChunk) -> DispatchEvent:
        """Issue one chunk; returns the event of its arrival."""

    def issued(self, op: Op, event: DispatchEvent) -> None:
        """Note that all chunks of a transfer have been issued; it has arrived once `event` has happened."""

    def ended(self, op: Op) -> None:
        """Note that a transfer has arrived."""

    def happens_in_s(self, event: DispatchEvent) -> float:
        """0 if `event` has happened, else the seconds after which to ask again."""

    def where(self, op: Op, *, weights: bool) -> str:
        """The place of an error, for its message; `weights`: while waiting for the weights of `op`."""

    def drain(self) -> None:
        """Block until all issued work is done."""

    def reset(self) -> None:
        """Drop what a step left, which may have ended early."""


@dataclass(slots=True)
class TransferRecord:
    """Times at which a transfer began to move and was seen to have arrived, by `time.perf_counter`."""

    op: Op
    num_bytes: int
    start_s: float = 0.0
    end_s: float = 0.0
