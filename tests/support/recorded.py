"""A recorded run: the events of some steps of a simulated pipeline, with the figures of a plausible machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from roundpipe_cli.dashboard.demo import SimulatedRun
from roundpipe_cli.events import (
    CheckpointSaved,
    DeviceSample,
    EvaluationFinished,
    Event,
    Notice,
    RunStarted,
    Sample,
    StepFinished,
    StepTimeline,
    WorkSeen,
)
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.pictures import span_of
from roundpipe_cli.schedule.timeline import Interval, Timeline, bubble_ratio, makespan_s, utilization

START_S = 1_800_000_000.0
UPDATE_S = 0.4  # between the end of a step's work and the start of the next


def recorded_step(num_workers: int) -> Timeline:
    """One step of Qwen3-8B's size with uploads, as once simulated for 2, 4 and 8 workers, of which others are parts."""
    num_recorded = min(8, max(2, num_workers))
    recorded = json.loads((Path(__file__).parents[1] / "golden" / "steps.json").read_text())[str(num_recorded)]
    intervals = (
        Interval(worker + more, lane, Kind(kind), stage, microbatch, start_us / 1e6, end_us / 1e6)
        for more in range(0, num_workers, num_recorded)
        for worker, lane, kind, stage, microbatch, start_us, end_us in recorded
        if worker + more < num_workers
    )
    return Timeline(num_workers, tuple(intervals))


def simulated_run(num_workers: int) -> SimulatedRun:
    """The recorded step as a prediction."""
    timeline = recorded_step(num_workers)
    return SimulatedRun(
        title="Qwen3-8B",
        settings="full",
        devices=tuple(f"4090:{worker}" for worker in range(num_workers)),
        timeline=timeline,
        step_s=makespan_s(timeline),
        tokens=16384,
        notes=("simulated by roundpipe, not measured",),
    )


def recorded_run(
    num_workers: int, num_done: int = 40, num_steps: int = 100, gpu: bool = True
) -> list[tuple[float, Event]]:
    """(time, event) of a run that is in the middle of its step `num_done` + 1."""
    timeline = recorded_step(num_workers)
    spans = tuple(
        span_of(i._replace(start_s=round(i.start_s, 6), end_s=round(i.end_s, 6)), fused_head=timeline.fused_head)
        for i in timeline.intervals
    )
    step_s = makespan_s(timeline) + UPDATE_S
    devices = tuple(f"cuda:{n}" if gpu else "cpu" for n in range(num_workers))
    events: list[tuple[float, Event]] = [
        (START_S, RunStarted(START_S, "Qwen3-8B", "lora bfloat16", devices, num_steps, 0)),
        (START_S, Notice("no limit of locked memory was found: weights are page-locked")),
    ]
    now_s = START_S
    for step in range(1, num_done + 1):
        events.append((now_s + step_s, StepTimeline(step, now_s, spans)))
        now_s += step_s
        events.append((now_s, _finished(step, num_steps, timeline, step_s, gpu=gpu)))
        events.append((now_s, _sample(now_s, num_workers, gpu)))
        if step % 10 == 0:
            loss = 1.02 * _loss(step)
            events.append((now_s, EvaluationFinished(step, num_steps, loss, math.exp(loss), 9000, 1.5, step > 0)))
            events.append((now_s, CheckpointSaved(step, f"outputs/qwen3-8b/step-{step:08d}", 2.25)))
    at_s = 0.6 * makespan_s(timeline)
    compute = [span for span in spans if span.lane == "compute"]
    done = tuple(span.moved(now_s) for span in compute if span.end_s <= at_s)
    half = [span.moved(now_s) for span in compute if span.start_s < at_s < span.end_s]
    running = tuple(replace(span, end_s=now_s + at_s) for span in half)
    return [*events, (now_s + at_s, WorkSeen(now_s + at_s, num_done + 1, done, running))]


def _loss(step: int) -> float:
    return 1.1 + 1.3 * math.exp(-step / 12) + 0.08 * math.sin(7.0 * step) * math.exp(-step / 60)


def _finished(step: int, num_steps: int, timeline: Timeline, step_s: float, *, gpu: bool) -> StepFinished:
    return StepFinished(
        step=step,
        num_steps=num_steps,
        loss=_loss(step),
        learning_rate=2e-4 * (1 - step / num_steps),
        grad_norm=0.4 + 0.3 / step,
        tokens=16384,
        tokens_per_s=16384 / step_s,
        step_s=step_s,
        bubble_ratio=bubble_ratio(timeline),
        utilization=tuple(utilization(timeline)),
        upload_bytes=7_000_000_000,
        device_peak_bytes=9_000_000_000,
        eta_s=step_s * (num_steps - step),
        epoch=step / 50,
        launch_bound_ratio=0.482 if gpu else 0.0,
        mfu=0.152 if gpu else None,
    )


def _sample(now_s: float, num_workers: int, gpu: bool) -> Sample:
    devices = tuple(
        DeviceSample(int((9 + n) * 1024**3), 24 * 1024**3, 61.0 + n, 287.0 + 4 * n) if gpu else DeviceSample()
        for n in range(num_workers)
    )
    return Sample(now_s, 21 * 1024**3, int(30.5 * 1024**3), 64 * 1024**3, devices)
