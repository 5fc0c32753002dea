"""The dashboard of `roundpipe bench --costs F --run`, live: what emulated workers do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from roundpipe_cli.dashboard.state import SIMULATED
from roundpipe_cli.engine.dispatch.emulate import Emulated, EmulatedInWork, OnBegun
from roundpipe_cli.events import Notice, RunStarted, Span, StepFinished, StepTimeline, Tell, WorkSeen, run_clock
from roundpipe_cli.schedule.drawn import span_of
from roundpipe_cli.schedule.timeline import COMPUTE, UP, utilization
from roundpipe_cli.units import counted, format_seconds

LOOK_S = 0.2
SHOWN_LANES = (COMPUTE, UP)


@dataclass
class LiveRuns:
    """Reports runs one after the other; a dashboard shows each as a step."""

    tell: Tell
    title: str
    num_workers: int
    planned_s: Sequence[float]
    """Simulated seconds of each run."""
    shows_work: bool
    """Whether a dashboard shows what workers do; otherwise only results are printed."""
    _clock: Callable[[], float] = field(default_factory=run_clock)
    _num_done: int = 0
    _started_s: float | None = None

    def run(self, name: str, emulate: Callable[[OnBegun | None], Emulated]) -> Emulated:
        """Carry out one run, which is given what to call when it begins.

        Args:
            name: of the schedule.
        """
        if not self.shows_work:
            found = emulate(None)
        else:
            if self._started_s is None:
                self._started_s = self._clock()
            devices = tuple(f"emulated:{worker}" for worker in range(self.num_workers))
            num_runs = len(self.planned_s)
            self.tell(RunStarted(self._started_s, self.title, name, devices, num_runs, self._num_done, SIMULATED))
            if not self._num_done:
                self.tell(Notice("workers are emulated: nothing is trained"))
            found = self._watched(emulate)
        self._num_done += 1
        bubble = f"bubble {100 * found.bubble_ratio:.1f} %"
        count = f"{self._num_done} of {counted(len(self.planned_s), 'run')}"
        self.tell(Notice(f"{count}: {name} took {format_seconds(found.makespan_s)}, {bubble}"))
        return found

    def _watched(self, emulate: Callable[[OnBegun | None], Emulated]) -> Emulated:
        step, over = self._num_done + 1, threading.Event()
        looks: list[threading.Thread] = []
        offset_s = began_s = self._clock() - time.perf_counter()

        def begun(work: EmulatedInWork) -> None:
            nonlocal began_s
            began_s += work.started_s
            looks.append(
                threading.Thread(target=self._look, args=(work, step, offset_s, over), name="looks", daemon=True)
            )
            looks[0].start()

        try:
            found = emulate(begun)
        finally:
            over.set()
            for thread in looks:
                thread.join()
        timeline = found.timeline
        items = sorted((item for item in timeline.intervals if item.lane in SHOWN_LANES), key=lambda one: one.start_s)
        spans = tuple(span_of(item, fused_head=timeline.fused_head) for item in items)
        self.tell(StepTimeline(step, began_s, spans))
        self.tell(self._finished(found, step))
        return found

    def _look(self, work: EmulatedInWork, step: int, offset_s: float, over: threading.Event) -> None:
        """Report several times a second what has ended since the previous look, and what runs now."""
        pending: list[Span] = []
        news = work.news()
        while not over.wait(LOOK_S):
            now_s = time.perf_counter()
            pending += next(news)
            done = tuple(_moved(span, offset_s) for span in pending if span.end_s <= now_s)
            pending = [span for span in pending if span.end_s > now_s]
            running = tuple(_moved(span, offset_s, now_s) for span in pending if span.start_s < now_s)
            self.tell(WorkSeen(offset_s + now_s, step, done, running))

    def _finished(self, found: Emulated, step: int) -> StepFinished:
        """A step without loss and tokens, which a costs file does not have."""
        return StepFinished(
            step=step,
            num_steps=len(self.planned_s),
            loss=0.0,
            learning_rate=0.0,
            grad_norm=0.0,
            tokens=0,
            tokens_per_s=0.0,
            step_s=found.makespan_s,
            bubble_ratio=found.bubble_ratio,
            utilization=tuple(utilization(found.timeline)),
            upload_bytes=0,
            device_peak_bytes=0,
            eta_s=sum(self.planned_s[step:]),
        )


def _moved(span: Span, offset_s: float, until_s: float | None = None) -> Span:
    end_s = span.end_s if until_s is None else until_s
    return Span(
        span.worker, span.lane, span.kind, span.stage, span.microbatch, span.start_s + offset_s, end_s + offset_s
    )


@contextlib.contextmanager
def live_runs(title: str, num_workers: int, planned_s: Sequence[float], *, plain: bool) -> Iterator[LiveRuns]:
    """A dashboard where this is a terminal, otherwise a line for each run.

    Args:
        plain: lines on a terminal too.
    """
    from roundpipe_cli.cli.display import Display
    from roundpipe_cli.cli.output import say
    from roundpipe_cli.events import Event

    def show(event: Event) -> None:
        if isinstance(event, Notice):
            say(event.text)

    with Display(show, dashboard=not plain) as display:
        yield LiveRuns(display, title, num_workers, planned_s, display.is_dashboard)
