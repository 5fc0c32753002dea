"""Events of a run, as frozen values. Code that shows or stores them never touches the engine.

Times called `time_s` are seconds on the run's clock: Unix time that never jumps (`run_clock`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

METRICS_NAME, EVAL_NAME, EVENTS_NAME, REPORT_NAME = "metrics.jsonl", "eval.jsonl", "events.jsonl", "report.json"
LOCK_NAME, HEADER_NAME, SCORES_NAME = ".roundpipe.lock", "header.json", "scores.jsonl"
"""Files of an output directory that tell of its run, or (a header) of rows that were scored."""


@dataclass(frozen=True)
class Notice:
    """Something that the user should read: a decision made for them, a loss, a limit."""

    text: str
    is_detail: bool = False
    """Says how things are, as expected: a screen without room leaves it out first."""


@dataclass(frozen=True)
class Phase:
    """The run has begun to do something that can take a while."""

    text: str


@dataclass(frozen=True)
class Fetching:
    """Progress of a download."""

    files_done: int
    num_files: int
    bytes_done: int
    """Bytes that came of the files that were not here."""
    num_bytes: int
    bytes_per_s: float
    """Rate of the bytes that came in this run, since it began."""


@dataclass(frozen=True)
class RunStarted:
    """The workers start; what follows are steps."""

    time_s: float
    title: str
    """The model, for instance."""
    settings: str
    """Short settings for a header, such as `lora bfloat16`."""
    devices: tuple[str, ...]
    """Device of each worker."""
    num_steps: int
    first_step: int
    """Steps that an earlier part of the run has done; 0 for a new one."""
    goal: str = "loss"
    """Content of the chart: `loss`, or `speed` where nothing is learnt (`bench --run`); `simulated` where nothing runs
    (`watch --demo`), which every screen and picture says."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a worker's work; lanes and kinds are those of `schedule.timeline`."""

    worker: int
    """-1 for the host."""
    lane: str
    """compute, up, down or host."""
    kind: str
    """F, R, B, U, D or O; H for the forward and backward of the head's stage, where they are one action."""
    stage: int
    microbatch: int
    """-1 where there is none."""
    start_s: float
    end_s: float

    def moved(self, seconds: float) -> Span:
        """The span, so much later."""
        return dataclasses.replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)


@dataclass(frozen=True)
class WorkSeen:
    """Computations of the running step: those that ended since the last look, and those that run now."""

    time_s: float
    step: int
    """From 1; 0 between two steps."""
    spans: tuple[Span, ...]
    """Finished pieces, on the run's clock."""
    running: tuple[Span, ...]
    """At most one per worker; ends at `time_s`."""


@dataclass(frozen=True)
class StepTimeline:
    """Everything that the workers did in one step, as measured."""

    step: int
    """From 1."""
    start_s: float
    """On the run's clock."""
    spans: tuple[Span, ...]
    """In seconds from `start_s`."""


@dataclass(frozen=True)
class StepFinished:
    """One optimizer update; the row of metrics.jsonl."""

    step: int
    """Number of the update, from 1."""
    num_steps: int
    """Updates of the whole run."""
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Tokens of the step's rows, padding left out."""
    tokens_per_s: float
    step_s: float
    """Seconds from the end of the step before, or of what came between them (an evaluation, a pause), to its own end:
    waits for the update before it are in it. The first has none. The last, one before an evaluation, and those in which
    layers are timed include their own update."""
    bubble_ratio: float
    """1 - busy / (workers x seconds from when the workers were given the step, or had ended the one before)."""
    utilization: tuple[float, ...]
    upload_bytes: int
    device_peak_bytes: int
    """Peak of the fullest device; 0 where bytes are not counted."""
    eta_s: float
    epoch: float | None = None
    """Epochs trained until its end, a part of one included; None where no rows are gone through (`bench --run`)."""
    preference: Mapping[str, float] | None = None
    """More keys of the row, for preference pairs."""
    launch_bound_ratio: float = 0.0
    """Share of the busy time in which GPUs may have waited for launches; a GPU that waits so counts as busy."""
    mfu: float | None = None
    """Model FLOPs utilization, see `Arithmetic`; None: not known."""


@dataclass(frozen=True)
class EvaluationFinished:
    """The model was tried on the evaluation rows; the row of eval.jsonl."""

    step: int
    """Updates done before."""
    num_steps: int
    loss: float
    """Mean over the target tokens of all evaluation rows, in nats; of preference pairs over the pairs."""
    perplexity: float
    """exp(loss)."""
    tokens: int
    """Target tokens."""
    seconds: float
    best: bool
    """Whether no evaluation before had a lower loss."""
    samples: tuple[tuple[str, str], ...] = ()
    """(prompt, generated answer)."""
    preference: Mapping[str, float] | None = None
    """Keys of the row in place of the perplexity, for preference pairs."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One worker's device; None for figures that its driver lacks."""

    used_bytes: int | None = None
    total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class Sample:
    """Memory and devices at one moment."""

    time_s: float
    process_bytes: int
    """Resident memory of the run, without pages of files."""
    host_used_bytes: int
    host_total_bytes: int
    """Memory of the machine or the container."""
    devices: tuple[DeviceSample, ...]
    """One per worker."""


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is durable."""

    step: int
    folder: str
    seconds: float
    pause_s: float = 0.0
    """Seconds that training waited for it; the rest ran beside training."""


@dataclass(frozen=True)
class DeviceLost:
    """A worker's device failed or hangs; the others compute again what it was at, where they can."""

    time_s: float
    worker: int
    device: str
    at: str
    """`step 5`."""
    cause: str
    left: tuple[str, ...]
    """Devices that go on; none where the run ends."""

    @property
    def text(self) -> str:
        """For the user, without the time."""
        text = f"{self.device} (worker {self.worker}) was lost at {self.at}: {self.cause}"
        return f"{text}; computed again on {', '.join(self.left)}" if self.left else text


@dataclass(frozen=True)
class Paused:
    """The user pauses the run between two steps (`paused`), or continues it."""

    step: int
    paused: bool


@dataclass(frozen=True)
class RunStopped:
    """The run ended before its last step."""

    text: str


@dataclass(frozen=True)
class RunFinished:
    """The result is written."""

    output_dir: str
    num_steps: int
    seconds: float


Event = (
    Notice | Phase | Fetching | RunStarted | WorkSeen | StepTimeline | StepFinished | EvaluationFinished | Sample
    | CheckpointSaved | DeviceLost | Paused | RunStopped | RunFinished
)  # fmt: skip
Tell = Callable[[Event], None]
"""Called with each event."""
Say = Callable[[str], None]
"""Called with each text for the user."""


def tell_notices(tell: Tell, *texts: str | None) -> None:
    """Report each text that there is as a notice."""
    for text in filter(None, texts):
        tell(Notice(text))


def run_clock() -> Callable[[], float]:
    """A clock that shows Unix time now and from then on never jumps, whatever happens to the system's time."""
    offset_s = time.time() - time.perf_counter()
    return lambda: offset_s + time.perf_counter()


# --- as lines of a file -----------------------------------------------------------------------------------------------

_CLASSES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
_field_types = functools.cache(get_type_hints)


def encode(event: Event) -> dict[str, Any]:
    """Plain JSON values of an event; `decode` makes the event again."""
    fields: dict[str, Any] = {"event": type(event).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name in ("spans", "running"):
            value = [_encode_span(span) for span in value]
        elif isinstance(event, Sample) and field.name == "devices":
            found = map(dataclasses.asdict, value)
            value = [{name: item for name, item in device.items() if item is not None} for device in found]
        fields[field.name] = value
    return fields


def _encode_span(span: Span) -> list[Any]:
    start_us = round(span.start_s * 1e6)
    names = [span.worker, span.lane, span.kind, span.stage, span.microbatch]
    return [*names, start_us, round(span.end_s * 1e6) - start_us]


MAX_NUMBER = 2.0**62
"""Times in seconds, counts and bytes are below it; larger ones cannot be drawn."""
MAX_INDEX = 1 << 20
"""Largest number of a worker, stage or microbatch: lists are made of that many."""
UNBOUNDED = frozenset({"perplexity", "grad_norm"})
"""Fields that may be infinite."""


def decode(fields: Mapping[str, Any]) -> Event | None:
    """The event of `encode`'s values; None for what no event has, such as a later version's, and for values of other
    types."""
    kind = _CLASSES.get(str(fields.get("event")))
    if kind is None or fields.get("step_s") == 0:  # rates are divided by it
        return None
    try:
        return cast("Event", from_json(fields, kind))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def from_json(value: Any, hint: Any) -> Any:
    """The value of a dataclass or a field's type that JSON's `value` stands for: of the right types, and finite.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: there is none.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Span:
        return _made_span(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        asked = (one for one in dataclasses.fields(hint) if one.name in value or one.default is dataclasses.MISSING)
        given = {one.name: value[one.name] for one in asked}
        types = _field_types(hint)
        unbounded = {name for name in UNBOUNDED & given.keys() if given[name] == float("inf")}
        return hint(**{n: given[n] if n in unbounded else from_json(given[n], types[n]) for n in given})
    if origin is tuple and isinstance(value, list):
        wanted = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_json(item, of) for item, of in zip(value, wanted, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {from_json(key, inner[0]): from_json(of, inner[1]) for key, of in value.items()}
    if origin is UnionType:  # with None
        return None if value is None else from_json(value, inner[0])
    if hint in (float, int):
        is_number = isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
        if is_number and abs(value) < MAX_NUMBER:
            return hint(value)
    elif origin is None and isinstance(value, hint):
        return value
    raise ValueError(f"{value} is no {hint}")


def _made_span(item: Any) -> Span:
    worker, lane, kind, stage, microbatch, start_us, us = item
    if not all(isinstance(index, int) and -1 <= index < MAX_INDEX for index in (worker, stage, microbatch)):
        raise ValueError("a piece of work of nobody")
    if len(from_json(kind, str)) != 1:  # lanes draw one letter for each slice of time
        raise ValueError(f"a kind of work {kind!r}")
    start_s, end_s = (from_json(time_us / 1e6, float) for time_us in (start_us, start_us + us))
    return Span(worker, from_json(lane, str), kind, stage, microbatch, start_s, end_s)
