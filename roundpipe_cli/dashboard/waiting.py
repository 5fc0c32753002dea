"""Explains why a worker waited in a step.

compute  ....FFFF....BBBB..RRBB........
up       ..uuu......uuu                     (weights of the next stage)
             upload  boundary  boundary  tail or update

Only what the next computation needs counts: weights of its own stage, and the result of the stage before for its
microbatch. A measured step may also wait for the program to launch its work; simulated ones do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.dashboard.state import DashboardState
from roundpipe_cli.events import Span, StepTimeline
from roundpipe_cli.schedule.pictures import BOTH
from roundpipe_cli.schedule.timeline import merged
from roundpipe_cli.units import format_seconds

CAUSES = {
    "upload": "the weights of its next stage had not arrived yet",
    "boundary": "another worker's result, which it needed next, had not arrived yet",
    "launch": "nothing was missing, but this program had not started its next work yet",
    "update": "the host had not updated the weights that it needed next",
    "tail": "the step had no work left for it",
}
"""Cause of a wait -> what it means."""
REMEDIES = {
    "upload": "larger microbatches (micro_batch_tokens) or weights in fewer bits (load_in_8bit, load_in_4bit) help",
    "boundary": "more microbatches a step (gradient_accumulation_steps) help",
    "launch": "larger microbatches (micro_batch_tokens) help",
    "update": "rarer updates (a larger gradient_accumulation_steps) help",
    "tail": "more microbatches a step (gradient_accumulation_steps) help",
}
"""Cause of a wait -> what makes it shorter."""
WORTH_SAYING = 0.15
"""A wait of a smaller share of the step is no reason to change a recipe."""
MIN_SHARE = 0.001
"""Causes of less than this share of the step are left out."""
LAUNCHING = ("loss", "speed")
"""Goals of runs whose work a program launches; see `RunStarted.goal`."""
_Piece = tuple[float, float]
_Work = tuple[str, int, int]
"""Kind, stage and microbatch."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The idle time of one worker in one step."""

    worker: int
    step: int
    step_s: float
    """Seconds up to the end of the last work of all workers."""
    by_cause_s: dict[str, float]
    """Seconds by the names of `CAUSES`."""
    host_part_s: float = 0.0
    """Seconds of the step before its first work and after its last, in which no worker had any."""

    @property
    def total_s(self) -> float:
        return sum(self.by_cause_s.values())

    def text(self) -> str:
        """`worker 2 waited 1.03 s of step 40 (26 %): boundary 611 ms, tail 420 ms`, and what came after the step."""
        after = ""
        if self.host_part_s > MIN_SHARE * self.step_s:
            host_s = format_seconds(self.host_part_s)
            after = f"; besides, all workers waited {host_s} while the host prepared microbatches or ended an update"
        if not self.by_cause_s:
            return f"worker {self.worker} did not wait in step {self.step}{after}"
        causes = sorted(self.by_cause_s.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in causes)
        share = f"{format_seconds(self.total_s)} of step {self.step} ({100 * self.total_s / self.step_s:.0f} %)"
        return f"worker {self.worker} waited {share}: {parts}{after}"

    def lines(self) -> list[str]:
        """The text, and the meaning of each cause in it."""
        return [self.text(), *(f"{cause}: {CAUSES[cause]}" for cause in self.by_cause_s)]


def longest_waiting(state: DashboardState) -> Waiting | None:
    """The worker that waited most in the newest step; None if nothing is known of the step."""
    step = state.timeline
    if step is None:
        return None
    launches = state.run is not None and state.run.goal in LAUNCHING
    there = (index for index, worker in enumerate(state.workers) if not worker.lost_at)
    found = [waiting(step, worker, launches=launches) for worker in there]
    longest = max((one for one in found if one is not None), key=lambda one: one.total_s, default=None)
    row = state.step
    if longest is None or row is None or row.step != step.step or row.preference is not None:
        return longest  # the base model may have looked at pairs beside the step
    has_host_part = state.run is not None and state.run.goal == "loss"
    return replace(longest, host_part_s=max(0.0, row.step_s - longest.step_s)) if has_host_part else longest


def advice(state: DashboardState) -> tuple[str, str] | None:
    """(cause, line) on the worker that waited most in the newest step, with a remedy; None where it is not worth it."""
    found = longest_waiting(state)
    if found is None or found.total_s < WORTH_SAYING * found.step_s:
        return None
    cause = max(found.by_cause_s, key=lambda name: found.by_cause_s[name])
    waited = f"worker {found.worker} waited {100 * found.total_s / found.step_s:.0f} % of step {found.step}"
    return cause, f"{waited}, most of it because {CAUSES[cause]}: {REMEDIES[cause]}"


def waiting(step: StepTimeline, worker: int, *, launches: bool = True) -> Waiting | None:
    """Why `worker` waited; None if the step has no work at all.

    Args:
        launches: the rest of a wait is time in which nothing was missing; False: a hop, for nothing has to be launched.
    """
    end_s = max((span.end_s for span in step.spans), default=0.0)
    if not end_s:
        return None
    inputs = _Inputs(step, worker)
    seconds = dict.fromkeys(CAUSES, 0.0)
    free_s = 0.0
    for span in sorted((one for one in inputs.own if one.lane == "compute"), key=lambda one: one.start_s):
        if span.start_s > free_s:
            for cause, time_s in inputs.causes(span, (free_s, span.start_s)).items():
                seconds[cause if launches or cause != "launch" else "boundary"] += time_s
        free_s = max(free_s, span.end_s)
    update_s = _overlap(inputs.updates, (free_s, end_s))
    seconds["update"] += update_s
    seconds["tail"] += end_s - free_s - update_s
    kept = {cause: time_s for cause, time_s in seconds.items() if time_s > MIN_SHARE * end_s}
    return Waiting(worker, step.step, end_s, kept)


class _Inputs:
    """Inputs of a worker's computations in a step, and the times at which they were ready."""

    def __init__(self, step: StepTimeline, worker: int) -> None:
        spans = [replace(span, kind="B") if span.kind == BOTH else span for span in step.spans]
        self.own = [span for span in spans if span.worker == worker]
        self._host = [span for span in spans if span.lane == "host" and span.worker in (-1, worker)]
        self.updates = _merged(self._host)
        """Times of the host's updates in a simulated step; in a measured one of this worker's waits for them."""
        self._ended: dict[_Work, Span] = {
            (span.kind, span.stage, span.microbatch): span for span in spans if span.lane == "compute"
        }
        self._last_forward = max((stage for kind, stage, _ in self._ended if kind == "F"), default=-1)
        self._weights: dict[int, list[Span]] = {}
        """Stage -> uploads for it."""
        self._tensors: dict[tuple[int, int], list[Span]] = {}
        """(Stage, microbatch) -> uploads for it."""
        for span in self.own:
            if span.lane == "up" and span.microbatch < 0:
                self._weights.setdefault(span.stage, []).append(span)
            elif span.lane == "up":
                self._tensors.setdefault((span.stage, span.microbatch), []).append(span)

    def causes(self, work: Span, gap: _Piece) -> dict[str, float]:
        """Cause -> seconds of a gap before `work`. Moving weights come first, then results, then updates, then weights
        that had not begun to move (their memory was not free)."""
        uploads = [span for span in self._weights.get(work.stage, ()) if span.start_s < gap[1]]
        moving = _merged(uploads)
        weights_s = min(gap[1], max((span.end_s for span in uploads), default=gap[0]))
        result_s = max(gap[0], min(gap[1], self._result_s(work)))
        upload_s = _overlap(moving, gap)
        boundary_s = result_s - gap[0] - _overlap(moving, (gap[0], result_s))
        missing, ready_s = (result_s, max(weights_s, result_s)), max(weights_s, result_s)
        moving_s = _overlap(moving, missing)
        update_s = _overlap(_merged([*self._host, *uploads]), missing) - moving_s
        upload_s += ready_s - result_s - moving_s - update_s
        launch_s = gap[1] - ready_s - _overlap(self.updates, (ready_s, gap[1]))
        update_s += gap[1] - ready_s - launch_s
        return {"upload": upload_s, "boundary": boundary_s, "update": update_s, "launch": launch_s}

    def _result_s(self, work: Span) -> float:
        """When the result that `work` reads was there: the stage before had ended, on whichever worker, and all that
        goes up for it had arrived."""
        before = _before(work, self._last_forward)
        tensors = self._tensors.get((work.stage, work.microbatch), ())
        ends = [span.end_s for span in tensors if span.start_s < work.start_s]
        if before in self._ended:
            ends.append(self._ended[before].end_s)
        return max(ends, default=0.0)


def _before(work: Span, last_forward: int) -> _Work | None:
    """The computation whose result `work` reads; None where that is from long before, or from nobody."""
    if work.kind == "F":
        return ("F", work.stage - 1, work.microbatch)
    if work.kind == "B":
        return ("B", work.stage - 1, work.microbatch) if work.stage else ("F", last_forward, work.microbatch)
    return None


def _merged(spans: Sequence[Span]) -> list[_Piece]:
    """The times that the spans cover, in order, without overlap."""
    return merged((span.start_s, span.end_s) for span in spans)


def _overlap(pieces: Sequence[_Piece], gap: _Piece) -> float:
    return sum(max(0.0, min(end, gap[1]) - max(start, gap[0])) for start, end in pieces)
