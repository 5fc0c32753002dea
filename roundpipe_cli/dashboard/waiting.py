"""Why a worker waited in a step, in words: its idle time by what it lacked. From the step's timeline alone.

compute  ....FFFF....BBBB..RRBB........
up       ..uuu......uuu                     (weights of the next stage)
             upload  boundary  boundary  tail or host

Simulated steps have all of these. A measured one has no links: there upload and boundary are one cause, `input`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_cli.events import Span, StepTimeline
from roundpipe_cli.units import format_seconds

CAUSES = {
    "upload": "its weights were still on the link",
    "boundary": "results of other workers were not there yet",
    "input": "weights or results of other workers were not there yet; a measured step does not record its links",
    "host": "the host was updating weights",
    "tail": "no work was left for it in the step",
}
"""Cause of a wait -> what it means."""
MIN_SHARE = 0.001
"""Shorter causes are left out: a share of the step."""
_Piece = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The idle time of one worker in one step."""

    worker: int
    step: int
    step_s: float
    """Up to the end of the last work of all."""
    by_cause_s: dict[str, float]
    """Seconds by the names of `CAUSES`."""

    @property
    def total_s(self) -> float:
        return sum(self.by_cause_s.values())

    def text(self) -> str:
        """`worker 2 waited 1.03 s of step 40 (26 %): boundary 611 ms, tail 420 ms`."""
        if not self.by_cause_s:
            return f"worker {self.worker} did not wait in step {self.step}"
        causes = sorted(self.by_cause_s.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in causes)
        share = f"{100 * self.total_s / self.step_s:.0f} %"
        return f"worker {self.worker} waited {format_seconds(self.total_s)} of step {self.step} ({share}): {parts}"


def longest_waiting(step: StepTimeline, num_workers: int) -> Waiting | None:
    """The worker that waited most; None if nothing is known of the step."""
    found = [waiting(step, worker) for worker in range(num_workers)]
    return max((one for one in found if one is not None), key=lambda one: one.total_s, default=None)


def waiting(step: StepTimeline, worker: int) -> Waiting | None:
    """Why `worker` waited; None if the step has no work at all."""
    end_s = max((span.end_s for span in step.spans), default=0.0)
    if not end_s:
        return None
    mine = [span for span in step.spans if span.worker == worker]
    busy = _merged([span for span in mine if span.lane == "compute"])
    weights = _merged([span for span in mine if span.lane == "up" and span.microbatch < 0])
    host = _merged([span for span in step.spans if span.lane == "host"])
    lacks = "boundary" if any(span.lane == "up" for span in step.spans) else "input"
    seconds = dict.fromkeys(CAUSES, 0.0)
    starts, ends = [0.0, *(end for _, end in busy)], [*(start for start, _ in busy), end_s]
    for index, gap in enumerate(zip(starts, ends, strict=True)):
        length_s, is_last = gap[1] - gap[0], index == len(busy)
        if length_s <= 0:
            continue
        upload_s = 0.0 if is_last else _overlap(weights, gap)
        host_s = min(length_s - upload_s, _overlap(host, gap))
        seconds["upload"] += upload_s
        seconds["host"] += host_s
        seconds["tail" if is_last else lacks] += length_s - upload_s - host_s
    kept = {cause: time_s for cause, time_s in seconds.items() if time_s > MIN_SHARE * end_s}
    return Waiting(worker, step.step, end_s, kept)


def _merged(spans: Sequence[Span]) -> list[_Piece]:
    """The times that the spans cover, in order and apart."""
    pieces: list[_Piece] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans if span.end_s > span.start_s):
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(end, pieces[-1][1]))
        else:
            pieces.append((start, end))
    return pieces


def _overlap(pieces: Sequence[_Piece], gap: _Piece) -> float:
    return sum(max(0.0, min(end, gap[1]) - max(start, gap[0])) for start, end in pieces)
