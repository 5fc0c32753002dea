"""Emulated devices: the real dispatcher, queues and events, no mathematics. No torch.

A stream is a clock, as CUDA's is seen from the host: issuing returns at once. An operation starts at the latest of
the wall time of its issue, the end of the operation before it on that stream, and the ends of the events that it waits
for; its end is fixed then and is its event: an absolute time of `time.perf_counter`. Nothing sleeps per operation;
only a host wait sleeps, until an absolute deadline. So work that the host issues too late shows, and is counted, as on
a GPU.

    wall    issue A    issue B                issue C (late)
    stream  |---- A ----|---- B ----|  late   |---- C ----|
"""

from __future__ import annotations

import time
from collections.abc import Sequence

EmulatedEvent = float | None
"""The absolute time at which something ends; None: it has already happened."""


class StreamClock:
    """One stream of an emulated device."""

    def __init__(self) -> None:
        self.end_s = 0.0
        """End of the last operation issued."""
        self.late_s = 0.0
        """Time that the stream lost because the host issued too late."""

    def start_step(self, now_s: float) -> None:
        """Start counting at `now_s`."""
        self.end_s, self.late_s = now_s, 0.0

    def issue(
        self,
        seconds: float,
        after: Sequence[EmulatedEvent] = (),
        lead_s: float = 0.0,
        late: Sequence[EmulatedEvent] = (),
    ) -> tuple[float, float]:
        """Put an operation on the stream; returns (start, end).

        Args:
            seconds: what it takes.
            after: events that it waits for.
            lead_s: its first part, which does not need `late`; it runs right before the rest.
            late: events that only the rest waits for.
        """
        now_s = time.perf_counter()
        could_s = max(self.end_s, *(event for event in after if event is not None), 0.0)
        needed_s = max((event for event in late if event is not None), default=0.0)
        could_s = max(could_s, needed_s - lead_s)
        start_s = max(now_s, could_s)
        self.late_s += start_s - could_s
        self.end_s = start_s + seconds
        return start_s, self.end_s


class EmulatedDevice:
    """One worker's streams."""

    def __init__(self) -> None:
        self.compute, self.up, self.down = StreamClock(), StreamClock(), StreamClock()

    def start_step(self, now_s: float) -> None:
        """Set all streams idle and start counting at `now_s`."""
        for clock in (self.compute, self.up, self.down):
            clock.start_step(now_s)

    @property
    def late_s(self) -> float:
        """Time that the compute stream and the links lost because the host issued too late."""
        return self.compute.late_s + self.up.late_s + self.down.late_s


def happens_in_s(event: EmulatedEvent) -> float:
    """0 if `event` has happened, else the seconds until it does."""
    return 0.0 if event is None else max(0.0, event - time.perf_counter())


def finish(event: EmulatedEvent) -> None:
    """Block the host until `event` has happened."""
    while (left_s := happens_in_s(event)) > 0:
        time.sleep(left_s)
