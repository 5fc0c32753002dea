"""The state of a run from its events: an immutable snapshot, and the fold to the next one. No clock, no terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from roundpipe_cli import events
from roundpipe_cli.units import counted, format_bytes, format_loss, format_seconds

# Keeps the work of a worker that a lane needs, and merges short pieces.

NICE_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
KEPT_WINDOWS = 2
"""Lanes that are kept: sums begin up to one lane's length before the shown part."""
MAX_SPANS = 8000
"""Most spans per worker; beyond them short pieces are merged."""
PIECES = 800
"""More slices than any lane has."""


def window_s(step_s: float | None) -> float:
    """Seconds that a lane shows: a round number, about one and a half steps."""
    wanted = 1.5 * (step_s or 5.0)
    return next((seconds for seconds in NICE_S if seconds >= wanted), NICE_S[-1])


def recent(spans: tuple[events.Span, ...], now_s: float, step_s: float | None) -> tuple[events.Span, ...]:
    """The spans that a lane needs, in order of time; of very many, those that cannot be seen apart as one."""
    kept_s = KEPT_WINDOWS * NICE_S[-1]
    if spans and spans[0].end_s < now_s - kept_s:
        spans = tuple(span for span in spans if span.end_s >= now_s - kept_s)
    if len(spans) <= MAX_SPANS:
        return spans
    window = window_s(step_s)
    spans = tuple(span for span in spans if span.end_s >= now_s - KEPT_WINDOWS * window)
    return _together(spans, window / PIECES)[-MAX_SPANS:]


def _together(spans: tuple[events.Span, ...], piece_s: float) -> tuple[events.Span, ...]:
    """Spans shorter than a piece, by lane and kind, one after the other from where the first of the piece began.

    FRBFRB......FRBFRB  ->  FFRRBB......FFRRBB       (the time of each kind stays; a longer span stays as it is)
    """
    whole: list[events.Span] = []
    parts: dict[tuple[str, int], dict[str, events.Span]] = {}
    for span in spans:
        seconds = span.end_s - span.start_s
        if seconds >= piece_s:
            whole.append(span)
            continue
        kinds = parts.setdefault((span.lane, math.floor(span.start_s / piece_s)), {})
        before = kinds.get(span.kind)
        kinds[span.kind] = replace(before, end_s=before.end_s + seconds) if before else span
    for kinds in parts.values():
        start_s = min(span.start_s for span in kinds.values())
        for span in kinds.values():
            end_s = start_s + span.end_s - span.start_s
            whole.append(replace(span, start_s=start_s, end_s=end_s))
            start_s = end_s
    return tuple(sorted(whole, key=lambda span: span.start_s))


MAX_POINTS = 1024
"""Points of a curve: beyond them, neighbours are merged."""
MAX_MESSAGES = 100
SIMULATED = "simulated"
"""`RunStarted.goal` of a run that nobody ran."""
SAME_MOMENT_S = 1e-3


@dataclass(frozen=True)
class Mean:
    """A mean weighted by seconds, built up step by step."""

    weighted_sum: float = 0.0
    seconds: float = 0.0

    def with_value(self, value: float, seconds: float) -> Mean:
        return Mean(self.weighted_sum + value * seconds, self.seconds + seconds)

    @property
    def value(self) -> float:
        return self.weighted_sum / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Median:
    """The median of shares, to a thousandth: counts of values, whatever their number."""

    counts: tuple[int, ...] = (0,) * 1001

    def with_value(self, share: float) -> Median:
        at = min(1000, max(0, round(1000 * share)))
        return Median((*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :]))

    @property
    def value(self) -> float:
        """As `statistics.median_low`; 0 of nothing."""
        middle = (sum(self.counts) + 1) // 2
        return next(at for at, seen in enumerate(accumulate(self.counts)) if seen >= middle) / 1000


@dataclass(frozen=True)
class Curve:
    """Values by step. Long ones are thinned out evenly, by the mean of neighbours."""

    points: tuple[tuple[float, float], ...] = ()
    """(step, value), ascending."""
    stride: int = 1
    """Steps that one point stands for."""
    pending: tuple[tuple[float, float], ...] = ()
    """Fewer than `stride` values, to be merged into a point."""

    def with_value(self, step: float, value: float) -> Curve:
        if not math.isfinite(value):
            return self
        pending = (*self.pending, (step, value))
        if len(pending) < self.stride:
            return replace(self, pending=pending)
        points = (*self.points, _merged(pending))
        if len(points) <= MAX_POINTS:
            return Curve(points, self.stride)
        pairs = zip(points[::2], points[1::2], strict=False)
        odd = points[-1:] if len(points) % 2 else ()
        return Curve((*(_merged(pair) for pair in pairs), *odd), 2 * self.stride)

    @property
    def all_points(self) -> tuple[tuple[float, float], ...]:
        """The points, and one for what is pending."""
        return (*self.points, _merged(self.pending)) if self.pending else self.points


def _merged(points: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    count = len(points)
    return sum(step for step, _ in points) / count, sum(value for _, value in points) / count


@dataclass(frozen=True)
class ScreenMessage:
    """A line for the user."""

    time_s: float
    text: str
    is_detail: bool = False
    """Only where there is room."""


@dataclass(frozen=True)
class WorkerView:
    """One worker."""

    device: str
    spans: tuple[events.Span, ...] = ()
    """Latest work of the worker, on the run's clock; compute and links."""
    running: events.Span | None = None
    utilization: float | None = None
    """Share of the last step that it computed."""
    mean_utilization: Mean = Mean()
    sample: events.DeviceSample = events.DeviceSample()
    lost_at: str = ""
    """Where its device was lost."""


@dataclass(frozen=True)
class DashboardState:
    """Everything that a screen needs."""

    run: events.RunStarted | None = None
    workers: tuple[WorkerView, ...] = ()
    step: events.StepFinished | None = None
    step_seen_s: float = 0.0
    """End of the last step, on the run's clock."""
    median_bubble: Median = Median()
    """Value over the steps since the last start, as report.json has it."""
    losses: Curve = Curve()
    speeds: Curve = Curve()
    """Tokens per second by step."""
    evaluations: tuple[tuple[float, float], ...] = ()
    """(step, loss)."""
    timeline: events.StepTimeline | None = None
    """Work of the last step."""
    sample: events.Sample | None = None
    messages: tuple[ScreenMessage, ...] = ()
    phase: str = ""
    paused: bool = False
    stopped: str = ""
    finished: events.RunFinished | None = None
    seen_s: float = 0.0
    """Time up to which workers' actions are known, on the run's clock."""
    num_dropped: int = 0
    """Number of events that came faster than they could be shown."""

    @property
    def is_over(self) -> bool:
        return self.finished is not None or bool(self.stopped)

    @property
    def is_simulated(self) -> bool:
        """Whether nothing ran: a prediction is played."""
        return self.run is not None and self.run.goal == SIMULATED

    @property
    def pool(self) -> str:
        """The workers in a few words: `8 x cuda`."""
        devices = self.run.devices if self.run else ()
        kinds = {device.partition(":")[0] for device in devices}
        return f"{len(devices)} x {kinds.pop() if len(kinds) == 1 else 'devices'}"

    @property
    def worker_word(self) -> str:
        """`GPUs`, or `workers` where one of them is the processor."""
        devices = self.run.devices if self.run else ()
        return "workers" if any(device.partition(":")[0] == "cpu" for device in devices) else "GPUs"


def fold(state: DashboardState, event: events.Event, now_s: float) -> DashboardState:
    """The state after `event`, which came at `now_s` of the run's clock."""
    match event:
        case events.WorkSeen():
            return _work_seen(state, event)
        case events.StepTimeline():
            return _step_timeline(state, event)
        case events.StepFinished():
            return _step_finished(state, event, now_s)
        case events.Sample():
            pairs = zip(state.workers, event.devices, strict=False)
            workers = tuple(replace(worker, sample=sample) for worker, sample in pairs)
            return replace(state, sample=event, workers=workers + state.workers[len(workers) :])
        case events.RunStarted():
            workers = tuple(WorkerView(device) for device in event.devices)
            state = replace(state, run=event, workers=workers, stopped="", finished=None, median_bubble=Median())
            return replace(state, paused=False, phase="")
        case events.EvaluationFinished():
            if math.isfinite(event.loss):
                state = replace(state, evaluations=(*state.evaluations[-MAX_POINTS:], (event.step, event.loss)))
            return _said(replace(state, phase=""), now_s, _evaluation_words(event))
        case events.DeviceLost():
            workers = tuple(
                WorkerView(worker.device, worker.spans, lost_at=event.at) if index == event.worker else worker
                for index, worker in enumerate(state.workers)
            )
            return _said(replace(state, workers=workers), now_s, event.text)
        case events.RunFinished():
            return replace(state, finished=event, phase="", paused=False)
        case events.RunStopped():
            return _said(replace(state, stopped=event.text, phase="", paused=False), now_s, event.text)
        case events.Notice():
            return _said(state, now_s, event.text, is_detail=event.is_detail)
        case events.Phase():
            return replace(state, phase=event.text)
        case events.Fetching():
            return replace(state, phase=fetching_line(event))
        case events.CheckpointSaved():
            folder = event.folder.rstrip("/").rpartition("/")[2]
            return _said(state, now_s, f"checkpoint {folder} saved in {format_seconds(event.seconds)}")
        case events.Paused():
            text = f"paused after step {event.step}" if event.paused else "continuing"
            return _said(replace(state, paused=event.paused), now_s, text)


def fold_all(timed: Iterable[tuple[float, events.Event]], state: DashboardState | None = None) -> DashboardState:
    """The state after (time, event) pairs in order."""
    state = state or DashboardState()
    for time_s, event in timed:
        state = fold(state, event, time_s)
    return state


def compared(parts: Mapping[str, float] | None) -> list[tuple[str, str]]:
    """(name, value) of what a loss compares: rewards, which training is to make larger; the divergence from another."""
    forms = {"reward_margin": "{:.3g}", "reward_accuracy": "{:.0%}", "kl": "{:.3g}"}
    texts = {name: form.format(parts[name]) for name, form in forms.items() if parts and name in parts}
    return [(name.replace("_", " "), text.replace("%", " %")) for name, text in texts.items()]


def _evaluation_words(event: events.EvaluationFinished) -> str:
    """`evaluation after step 20: loss 1.1304, best so far`; with what the loss compares."""
    parts = "".join(f", {name} {value}" for name, value in compared(event.preference))
    best = ", best so far" if event.best else ""
    return f"evaluation after step {event.step}: loss {format_loss(event.loss)}{parts}{best}"


def fetching_line(event: events.Fetching) -> str:
    """`downloading: 3 of 12 files, 1.2 of 4 GiB, 85 MiB/s, 33 s left`."""
    left = event.num_bytes - event.bytes_done
    rate = f", {format_bytes(event.bytes_per_s)}/s" if event.bytes_per_s else ""
    rest = f", {format_seconds(left / event.bytes_per_s)} left" if left and event.bytes_per_s else ""
    size = f"{format_bytes(event.bytes_done)} of {format_bytes(event.num_bytes)}"
    return f"downloading: {event.files_done} of {counted(event.num_files, 'file')}, {size}{rate}{rest}"


def _said(state: DashboardState, now_s: float, text: str, *, is_detail: bool = False) -> DashboardState:
    return replace(state, messages=(*state.messages[1 - MAX_MESSAGES :], ScreenMessage(now_s, text, is_detail)))


def _closer(state: DashboardState, begin_s: float) -> tuple[WorkerView, ...]:
    """The workers, their work moved up to what begins at `begin_s`: an evaluation or a pause in which no step ran would
    empty the lanes. What a worker waits for between two steps stays, up to a quarter of a lane."""
    gap_s = begin_s - state.seen_s - window_s(state.step.step_s if state.step else None) / 4
    if gap_s <= 0:
        return state.workers
    return tuple(replace(worker, spans=tuple(one.moved(gap_s) for one in worker.spans)) for worker in state.workers)


def _work_seen(state: DashboardState, event: events.WorkSeen) -> DashboardState:
    if not event.step:  # between two steps the lanes stand still
        return replace(state, workers=tuple(replace(worker, running=None) for worker in state.workers))
    begin_s = min((span.start_s for span in (*event.spans, *event.running)), default=event.time_s)
    workers = _with_work(_closer(state, begin_s), event.spans, event.time_s, state.step.step_s if state.step else None)
    running = {span.worker: span for span in event.running}
    workers = tuple(replace(worker, running=running.get(index)) for index, worker in enumerate(workers))
    return replace(state, workers=workers, seen_s=max(state.seen_s, event.time_s), phase="")


def _step_timeline(state: DashboardState, event: events.StepTimeline) -> DashboardState:
    """The step's spans as measured take the place of what was seen of them while it ran."""
    spans = [span.moved(event.start_s) for span in event.spans]
    end_s = max((span.end_s for span in spans), default=event.start_s)
    before = [
        replace(worker, spans=tuple(span for span in worker.spans if span.start_s < event.start_s - SAME_MOMENT_S))
        for worker in _closer(state, event.start_s)
    ]
    workers = _with_work(before, spans, end_s, state.step.step_s if state.step else timeline_s(event))
    return replace(state, workers=workers, timeline=event, seen_s=max(state.seen_s, end_s), phase="")


def _with_work(
    workers: Sequence[WorkerView], spans: Sequence[events.Span], end_s: float, step_s: float | None
) -> tuple[WorkerView, ...]:
    """The workers with these spans, too, of which the last one ends at `end_s`; none is known to run."""
    new: list[list[events.Span]] = [[] for _ in workers]
    for span in spans:
        if 0 <= span.worker < len(new):
            new[span.worker].append(span)
    return tuple(
        replace(worker, spans=recent((*worker.spans, *own), end_s, step_s), running=None)
        for worker, own in zip(workers, new, strict=True)
    )


def _step_finished(state: DashboardState, event: events.StepFinished, now_s: float) -> DashboardState:
    timeline = state.timeline  # of another step where it was dropped, or is not recorded
    seconds = timeline_s(timeline) if timeline is not None and timeline.step == event.step else event.step_s
    workers = tuple(
        worker
        if worker.lost_at
        else replace(worker, utilization=share, mean_utilization=worker.mean_utilization.with_value(share, seconds))
        for worker, share in zip(state.workers, event.utilization, strict=False)
    )
    return replace(
        state,
        step=event,
        workers=workers + state.workers[len(workers) :],
        step_seen_s=now_s,
        median_bubble=state.median_bubble.with_value(event.bubble_ratio),
        losses=state.losses.with_value(event.step, event.loss),
        speeds=state.speeds.with_value(event.step, event.tokens_per_s),
        phase="",
    )


def timeline_s(timeline: events.StepTimeline) -> float:
    """Seconds from the step's start to the end of its last work."""
    return max((span.end_s for span in timeline.spans if span.lane != "host"), default=0.0)
