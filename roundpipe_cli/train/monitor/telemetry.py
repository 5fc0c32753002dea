"""Events about workers, devices and memory while a run trains, and the rows that other programs read.

`Telemetry` looks several times a second from a thread of its own; workers are never asked to wait for it. `Recorder`
passes every event on and appends what is worth keeping to events.jsonl: whole lines, so that a kill at any byte costs
at most the last one. Steps themselves are in metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundpipe_cli.costs.hardware import catalogue, find_gpu
from roundpipe_cli.costs.machine import host_memory, process_bytes
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.live import StepInWork
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import ResourceError, RoundpipeError, redact_values
from roundpipe_cli.events import (
    EVENTS_NAME,
    DeviceLost,
    DeviceSample,
    Event,
    Notice,
    Phase,
    RunStarted,
    RunStopped,
    Sample,
    Span,
    StepFinished,
    StepTimeline,
    Tell,
    WorkSeen,
    decode,
    encode,
)
from roundpipe_cli.files import STATE_FILE_MODE, write_atomically
from roundpipe_cli.regular_files import json_objects
from roundpipe_cli.schedule.pictures import span_of
from roundpipe_cli.schedule.timeline import Interval
from roundpipe_cli.train.prepare.devices import gpu_index
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import active_parameters
from roundpipe_cli.units import shown_step

# Memory, temperature and power of the workers' devices, as far as torch and the driver tell.
#
# Temperature and power need the package nvidia-ml-py (`pip install roundpipe-cli[monitor]`).


class DeviceSampler:
    """Samples the devices of all workers."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._indices = [int(name.removeprefix("cuda:")) if name.startswith("cuda:") else None for name in devices]
        self._handles: dict[int, Any] = {}
        found = {index for index in self._indices if index is not None}
        with contextlib.suppress(ImportError):
            if found:
                import pynvml

                self._driver: Any = pynvml
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlInit()
                    for index in sorted(found):  # one that the driver does not know leaves those before it
                        self._handles[index] = pynvml.nvmlDeviceGetHandleByUUID(cuda.uuid(index))

    def sample(self, workers: Collection[int]) -> tuple[DeviceSample, ...]:
        """One sample per worker; without figures but for these `workers`."""
        return tuple(
            DeviceSample() if index is None or worker not in workers else self._one(index)
            for worker, index in enumerate(self._indices)
        )

    def _one(self, index: int) -> DeviceSample:
        try:
            used_bytes, total_bytes = cuda.memory_use(index)
        except RuntimeError:  # the engine will find that it is lost
            return DeviceSample()
        if index not in self._handles:
            return DeviceSample(used_bytes, total_bytes)
        driver, handle = self._driver, self._handles[index]
        return DeviceSample(
            used_bytes,
            total_bytes,
            temperature_c=self._ask(lambda: driver.nvmlDeviceGetTemperature(handle, driver.NVML_TEMPERATURE_GPU)),
            power_w=self._ask(lambda: driver.nvmlDeviceGetPowerUsage(handle) / 1e3),  # milliwatts
        )

    def _ask(self, question: Callable[[], float]) -> float | None:
        with contextlib.suppress(self._driver.NVMLError):  # not every card has this figure
            return float(question())
        return None


LOOK_S = 0.2
SAMPLE_S = 1.0
TIMELINE_S = 2.0
"""Least time between two timelines in the file."""
KEPT_TIMELINES = 3
KEPT_NOTICES = 200
MAX_FILE_BYTES = 4 * 1024**2
"""At this size the file is rewritten with every second sample, the last timelines and notices."""

Clock = Callable[[], float]


def run_started(setup: Setup, time_s: float, first_step: int, num_steps: int) -> RunStarted:
    """The event that opens a run."""
    recipe = setup.recipe
    name = setup.source.name.rstrip("/").rpartition("/")[2]
    return RunStarted(time_s, name, f"{recipe.method} {recipe.dtype}", setup.devices, num_steps, first_step)


def step_timeline(result: StepResult, step: int, clock: Clock) -> StepTimeline:
    """The workers' actions, transfers and waits for updates in a step that has just ended, on the run's clock.

    Transfers end with the last action: what moves later is part of the time between two steps.
    """
    start_s = clock() - time.perf_counter() + result.started_s
    actions = result.timeline.intervals
    end_s = max((item.end_s for item in actions), default=0.0)
    links = (item._replace(end_s=min(item.end_s, end_s)) for item in result.links if item.start_s < end_s)
    spans = tuple(span_of(item, fused_head=result.fused_head) for item in (*actions, *links, *result.waits))
    if result.lanes[-1] >= result.num_workers:  # some are lost
        spans = tuple(replace(span, worker=result.lanes[span.worker]) for span in spans)
    return StepTimeline(step, start_s, spans)


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs that a token needs, and those that the cards promise: the model FLOPs utilization (MFU) of a step."""

    flops_per_token: float
    """In products of weights: 4 a weight that a token meets, 6 if it is trained. Without attention and recomputes."""
    cards: tuple[tuple[str, float | None], ...]
    """Each worker's device and the FLOP/s of its data sheet in the run's precision, without sparsity; None: not known,
    as of a processor."""

    @staticmethod
    def of(setup: Setup, num_machines: int = 1) -> Arithmetic:
        """The figures of a run, whose tokens so many machines share."""
        active = active_parameters(setup.model, list(setup.store.layouts))[1:]  # rows of the embedding are looked up
        trained = [layout.num_trainable_elements for layout in setup.store.layouts[1:]]
        flops = sum(4.0 * met + 2.0 * min(met, count) for met, count in zip(active, trained, strict=True))
        recipe = setup.recipe
        rates = [_promised(name, recipe.dtype, narrow=recipe.float16_accumulation) for name in setup.devices]
        return Arithmetic(flops / num_machines, tuple(zip(setup.devices, rates, strict=True)))

    def share(self, tokens_per_s: float, lanes: Sequence[int]) -> float | None:
        """The MFU; None where the figure of a card that works is not known.

        Args:
            lanes: numbers of the workers at work, which may share a card.
        """
        rates = dict(self.cards[lane] for lane in lanes)
        if None in rates.values() or not rates:
            return None
        return self.flops_per_token * tokens_per_s / sum(filter(None, rates.values()))


def _promised(device: str, dtype: str, *, narrow: bool) -> float | None:
    """FLOP/s of a device's data sheet; `narrow`: where products of float16 add up in float16."""
    known = find_gpu(cuda.device_name(gpu_index(device))) if device != "cpu" else None
    if known is None:
        return None
    card = catalogue()[known]
    if dtype == "float32":
        return card.fp32_tflops * 1e12
    return (card.fp16_acc16_tflops if narrow else card.acc32_tflops) * 1e12


def step_figures(result: StepResult, num_tokens: int, step_s: float, arithmetic: Arithmetic) -> dict[str, Any]:
    """The part of `StepFinished` that a step's result tells, by the names there."""
    same = "loss", "bubble_ratio", "launch_bound_ratio", "upload_bytes"
    return {
        **{name: getattr(result, name) for name in same},
        **{"grad_norm": result.gradient_norm, "device_peak_bytes": max(result.device_peak_bytes)},
        **{"tokens": num_tokens, "tokens_per_s": num_tokens / step_s, "step_s": step_s},
        "mfu": arithmetic.share(num_tokens / step_s, result.lanes),
    }


def in_lanes(result: StepResult, num_workers: int) -> tuple[float, ...]:
    """Share of the step that each worker of the run computed; 0 for those whose devices are lost."""
    shares = dict(zip(result.lanes, result.utilization, strict=True))
    return tuple(shares.get(worker, 0.0) for worker in range(num_workers))


class Telemetry:
    """A thread that reports workers, memory and devices, as a context manager."""

    def __init__(self, engine: Engine, devices: Sequence[str], tell: Tell, clock: Clock, *, live: bool) -> None:
        """`tell` is called from the thread; `live`: also with what the workers do."""
        self._engine, self._tell, self._clock, self._live = engine, tell, clock, live
        self._devices = devices
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        next_sample_s, over = 0.0, False
        try:
            sampler = DeviceSampler(self._devices)
            while True:
                if self._live:
                    self._look()
                if over or time.monotonic() >= next_sample_s:
                    next_sample_s = time.monotonic() + SAMPLE_S
                    self._tell(self._sample(sampler))
                if over:
                    return
                over = self._stop.wait(LOOK_S if self._live else SAMPLE_S)
        except Exception as error:  # the engine reports a failed device; the run continues without samples
            self._tell(Notice(f"memory and devices are no longer watched: {error}"))

    def _look(self) -> None:
        step = self._engine.step_in_work
        if step is None:
            self._tell(WorkSeen(self._clock(), 0, (), ()))
            return
        now_s, *seen = step.look()
        offset_s = self._clock() - time.perf_counter() + step.started_s
        done, running = (tuple(_span(item, step, offset_s) for item in items) for items in seen)
        self._tell(WorkSeen(offset_s + now_s, shown_step(step.step), done, running))

    def _sample(self, sampler: DeviceSampler) -> Sample:
        memory, devices = host_memory(), sampler.sample(self._engine.lanes)
        used_bytes = memory.total_bytes - memory.available_bytes
        return Sample(self._clock(), process_bytes(), used_bytes, memory.total_bytes, devices)


def _span(item: Interval, step: StepInWork, offset_s: float) -> Span:
    start_s, end_s = item.start_s + offset_s, item.end_s + offset_s
    item = item._replace(worker=step.lanes[item.worker], start_s=start_s, end_s=end_s)
    return span_of(item, fused_head=step.fused_head)


class EventRecorder:
    """Passes events on and keeps those of later use in a file; a full disk ends the file, not the run."""

    def __init__(self, output_dir: Path, clock: Clock, tell: Tell) -> None:
        """`output_dir`: locked; nothing is written there before `opened`. `tell` gets every event first."""
        self._path = output_dir / EVENTS_NAME
        self.clock, self._tell = clock, tell
        self._early: deque[tuple[float, Notice]] | None = deque(maxlen=KEPT_NOTICES)
        """Notices from before the file is open, with their times; None from then on."""
        self._lock = threading.Lock()
        self._file: int | None = None
        self._num_bytes = 0
        self._sample_s = 0.0
        """Least time between two samples in the file; 0: all of them."""
        self._next_sample_s = self._next_timeline_s = 0.0
        self._unwritten: deque[StepTimeline] = deque(maxlen=KEPT_TIMELINES)
        self._num_done = 0
        """Steps that are finished; a line that names no step says behind which one it is to be shown."""

    @contextlib.contextmanager
    def opened(self, first_step: int) -> Iterator[EventRecorder]:
        """The recorder, for a run of which `first_step` steps are done: what an earlier attempt wrote about later ones
        is cut off."""
        self._num_done = first_step
        with self._failing_softly():
            lines = read_lines(self._path) if first_step else []
            kept = [line for line in lines if _step(line) <= first_step]
            for line in kept:
                if _step(line, "after") > first_step:
                    line["after"] = first_step
            self._rewrite(kept)
        with self._lock:
            early, self._early = self._early or (), None
            for time_s, event in early:
                self._write(event, time_s)
        try:
            yield self
        except BaseException as error:
            text = error.problems[0].what if isinstance(error, RoundpipeError) else f"{type(error).__name__}: {error}"
            with self._lock:
                self._write_timelines()
                self._write(RunStopped(text))
            raise
        finally:
            with self._lock:
                self._write_timelines()
                self._close()

    def __call__(self, event: Event) -> None:
        self._tell(event)
        with self._lock:
            if isinstance(event, StepFinished):
                self._num_done = event.step
            if self._early is not None and isinstance(event, Notice):
                self._early.append((self.clock(), event))
            if self._file is None or isinstance(event, (StepFinished, WorkSeen)):
                return
            now_s = self.clock()
            if isinstance(event, StepTimeline):
                self._unwritten.append(event)
                if now_s >= self._next_timeline_s:
                    self._next_timeline_s = now_s + TIMELINE_S
                    self._write_timelines()
            elif not isinstance(event, Sample):
                self._write(event)
            elif now_s >= self._next_sample_s:
                self._next_sample_s = now_s + self._sample_s
                self._write(event)

    def _write_timelines(self) -> None:
        while self._unwritten:
            self._write(self._unwritten.popleft())

    def _write(self, event: Event, time_s: float | None = None) -> None:
        if self._file is None:
            return
        place = {"after": self._num_done} if isinstance(event, (Notice, DeviceLost, Phase, RunStopped)) else {}
        line = _line({"t": round(self.clock() if time_s is None else time_s, 3), **place, **encode(event)})
        with self._failing_softly():
            if os.write(self._file, line) < len(line):
                raise OSError("the disk is full")
            self._num_bytes += len(line)
            if self._num_bytes > MAX_FILE_BYTES:
                self._rewrite(_thinned(read_lines(self._path)))
                self._sample_s = max(2 * SAMPLE_S, 2 * self._sample_s)

    def _rewrite(self, lines: Sequence[dict[str, Any]]) -> None:
        self._close()
        data = b"".join(_line(line) for line in lines)
        write_atomically(self._path, data, STATE_FILE_MODE)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file, self._num_bytes = os.open(self._path, flags), len(data)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    @contextlib.contextmanager
    def _failing_softly(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ResourceError) as error:
            self._close()
            self._tell(Notice(f"{self._path} is no longer written, so others cannot follow this run: {error}"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of events.jsonl; a torn last line and what is no JSON object are left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return json_objects(data.rpartition(b"\n")[0])


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(redact_values(values), separators=(",", ":")).encode() + b"\n"


def _step(line: dict[str, Any], key: str = "step") -> int:
    step = line.get(key, 0)
    return step if type(step) is int else 0


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every second sample, the last few timelines and notices, and all that is rare."""
    places: dict[str, list[int]] = {"Sample": [], "StepTimeline": [], "Notice": []}
    for index, line in enumerate(lines):
        places.get(str(line.get("event")), []).append(index)
    dropped = {*places["Sample"][1::2], *places["StepTimeline"][:-KEPT_TIMELINES], *places["Notice"][:-KEPT_NOTICES]}
    return [line for index, line in enumerate(lines) if index not in dropped and decode(line) is not None]
