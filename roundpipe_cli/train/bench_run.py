"""Schedules compared for real: the same microbatches through the same engine, in turn, under each schedule."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from roundpipe_cli.choices import BOUND_SCHEDULES, ScheduleName
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import InternalError
from roundpipe_cli.events import Notice, Say, StepFinished, Tell, run_clock
from roundpipe_cli.planning.adaptive import PROFILE_STEPS
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import Result, run
from roundpipe_cli.planning.profile import measured_costs, measured_speeds, profile_schedule
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.schedule.dealing import Options
from roundpipe_cli.train.batches import make_microbatches, make_sampler
from roundpipe_cli.train.build import make_engine, make_planner, page_locked
from roundpipe_cli.train.monitor.telemetry import Telemetry, run_started, step_timeline
from roundpipe_cli.train.setup import Setup, prepare

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}
"""Allowed relative difference between the losses of two schedules."""


@dataclass
class Measured:
    """One schedule, predicted and measured."""

    predicted: Result
    steps: list[StepResult] = field(default_factory=list)
    num_tokens: int = 0
    device_peak_bytes: int = 0
    """Highest peak of a worker; on the processor, live tensors of a separate step."""

    @property
    def name(self) -> str:
        return self.predicted.schedule.name

    @property
    def makespan_s(self) -> float:
        """Median seconds of forward and backward of one step."""
        return statistics.median(step.step_s for step in self.steps)

    @property
    def bubble_ratio(self) -> float:
        return statistics.median(step.bubble_ratio for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.makespan_s

    @property
    def loss(self) -> float:
        return self.steps[0].loss


@dataclass(frozen=True)
class Comparison:
    """All schedules of one recipe."""

    costs: CostModel
    """Costs measured here, with all workers busy."""
    devices: tuple[str, ...]
    num_microbatches: int
    schedules: tuple[Measured, ...]


def compare_for_real(
    loaded: LoadedRecipe,
    names: Sequence[ScheduleName],
    *,
    repetitions: int,
    tell: Tell,
    say: Say,
    live: bool = False,
) -> Comparison:
    """Profile the layers, plan each schedule with the measured costs, then run all of them in turn.

    No weight is changed: the same step is computed again and again.

    Args:
        live: report several times a second what the workers do.

    Raises:
        RefusedError: recipe, model or data refused.
        InternalError: two schedules give different losses.
    """
    setup = prepare(loaded, offline=False, tell=tell)
    microbatches, num_tokens = make_microbatches(setup, make_sampler(setup).next_step())
    clock = run_clock()
    with (
        page_locked(setup.store, setup.devices, setup.recipe.weights, tell),
        make_engine(setup) as engine,
        Telemetry(engine, setup.devices, tell, clock, live=live),
    ):
        num_steps = PROFILE_STEPS + 1 + (repetitions + 1) * len(names)
        tell(replace(run_started(setup, clock(), 0, num_steps), goal="speed"))
        teller = _Teller(tell, clock, num_steps, num_tokens)
        say(f"profiling: {PROFILE_STEPS} steps with one layer a stage")
        costs = profile(engine, setup, microbatches, teller)
        case = make_planner(setup).case(len(microbatches) * setup.recipe.pipeline.num_chunks, costs=costs)
        bound = replace(case, options=Options())
        measured = []
        for name in names:
            asked = bound if name in BOUND_SCHEDULES else case
            found = run(name, choose(name, asked, effort="quick"), asked)
            measured.append(Measured(found, num_tokens=num_tokens))
        for repetition in range(repetitions + 1):
            for entry in measured:
                result = engine.run_step(microbatches, entry.predicted.schedule, step=0)
                teller.ran(result)
                if repetition:  # the first round warms up
                    entry.steps.append(result)
            say(f"round {repetition} of {repetitions}{'' if repetition else ' (warm-up)'}")
        for entry in measured:
            entry.device_peak_bytes = max(max(step.device_peak_bytes) for step in entry.steps)
    if setup.devices[0] == "cpu":
        say("counting memory: one more step of each schedule")
        with make_engine(setup, count_bytes=True) as engine:
            for entry in measured:
                peaks = engine.run_step(microbatches, entry.predicted.schedule, step=0).device_peak_bytes
                entry.device_peak_bytes = max(peaks)
    check_losses(measured, TOLERANCE[setup.recipe.dtype])
    return Comparison(costs, setup.devices, len(microbatches), tuple(measured))


class _Teller:
    """Reports each step as if it were a step of training."""

    def __init__(self, tell: Tell, clock: Callable[[], float], num_steps: int, num_tokens: int) -> None:
        self._tell, self._clock, self._num_steps, self._num_tokens = tell, clock, num_steps, num_tokens
        self._step_s: list[float] = []

    def ran(self, result: StepResult) -> None:
        """A step has just ended."""
        self._step_s.append(result.step_s)
        step = len(self._step_s)
        for text in result.notices:
            self._tell(Notice(text))
        self._tell(step_timeline(result, step, self._clock))
        self._tell(
            StepFinished(
                step=step,
                num_steps=self._num_steps,
                loss=result.loss,
                learning_rate=0.0,
                grad_norm=result.gradient_norm,
                tokens=self._num_tokens,
                tokens_per_s=self._num_tokens / result.step_s,
                step_s=result.step_s,
                bubble_ratio=result.bubble_ratio,
                utilization=result.utilization,
                upload_bytes=result.upload_bytes,
                device_peak_bytes=max(result.device_peak_bytes),
                eta_s=statistics.median(self._step_s) * (self._num_steps - step),
            )
        )


def profile(
    engine: Engine, setup: Setup, microbatches: Sequence[Microbatch], teller: _Teller | None = None
) -> CostModel:
    """Costs of the layers, measured by steps with one layer a stage."""
    chunks = setup.recipe.pipeline.num_chunks
    schedule = profile_schedule(engine.num_layers, engine.num_workers, len(microbatches) * chunks, chunks)
    steps = []
    for _ in range(PROFILE_STEPS + 1):
        result = engine.run_step(microbatches, schedule, step=0)
        steps.append(result.timeline)
        if teller is not None:
            teller.ran(result)
    rough = make_planner(setup).rough
    speeds = measured_speeds(rough, steps[1:], engine.num_workers) if engine.num_workers > 1 else None
    return measured_costs(replace(rough, worker_speed=speeds), steps[1:])


def check_losses(measured: Sequence[Measured], tolerance: float) -> None:
    """Refuse to compare schedules that do not compute the same.

    Raises:
        InternalError: which two, and their losses.
    """
    first = measured[0]
    for entry in measured[1:]:
        if abs(entry.loss - first.loss) > tolerance * abs(first.loss):
            raise InternalError(
                "two schedules give different losses",
                found=f"{first.name} {first.loss}, {entry.name} {entry.loss}",
                expected=f"equal within {tolerance:g} relative",
            )
