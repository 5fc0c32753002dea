"""Schedules compared for real: the same microbatches through the same engine, in turn, under each schedule."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from roundpipe_cli.choices import ScheduleName
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import InternalError
from roundpipe_cli.events import Say, StepFinished, Tell, run_clock, tell_notices
from roundpipe_cli.planning.adaptive import PROFILE_STEPS, measured_costs, measured_speeds, profile_schedule
from roundpipe_cli.planning.choose import case_for, choose, given_cut, in_long_rounds
from roundpipe_cli.planning.compare import Result, SimulationCase, StageCut, run
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.planning.run_plan import with_schedule
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.train.auto_cache import KeptWeights, is_cache_open, trained_weight_bytes, weights_to_keep
from roundpipe_cli.train.batches import make_microbatches, make_sampler
from roundpipe_cli.train.build import make_engine, make_planner, weight_cache_bytes
from roundpipe_cli.train.monitor.telemetry import Arithmetic, Telemetry, run_started, step_figures, step_timeline
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}
"""Allowed relative difference between the losses of two schedules."""


@dataclass
class Measured:
    """One schedule, predicted and measured."""

    asked: ScheduleName
    predicted: Result
    cut: StageCut
    """The stages of devices that keep no weights."""
    case: SimulationCase
    """The case of the prediction."""
    steps: list[StepResult] = field(default_factory=list)
    num_tokens: int = 0
    device_peak_bytes: int = 0
    """Highest peak of a worker; on the processor, live tensors of a separate step."""
    cache_bytes: int = 0
    """Memory of each GPU for weights that stay there from step to step."""
    holds_all: bool = False
    """Whether its stages are cut for GPUs that hold all weights."""

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
    asked: PlanRequest | None = None,
) -> Comparison:
    """Profile the layers, plan each schedule with the measured costs, then run all of them in turn: the same step again
    and again, which changes no weight.

    Args:
        live: report several times a second what the workers do.
        asked: see `ask_here`.
    """
    setup = prepare(loaded, offline=False, tell=tell, asked=asked)
    microbatches, num_tokens = make_microbatches(setup, make_sampler(setup).next_step())
    clock = run_clock()
    with (
        PageLocks(setup.store, setup.devices, setup.recipe.weights, tell),
        make_engine(setup) as engine,
        Telemetry(engine, setup.devices, tell, clock, live=live),
    ):
        num_steps = PROFILE_STEPS + 1 + (repetitions + 1) * len(names)
        tell(replace(run_started(setup, clock(), 0, num_steps), goal="speed"))
        ran = _teller(tell, clock, num_steps, num_tokens, arithmetic=Arithmetic.of(setup))
        say(f"profiling: {PROFILE_STEPS} steps with one layer a stage")
        planner = make_planner(setup)
        costs = profile(engine, setup, microbatches, planner.rough, ran=ran)
        case = planner.case(len(microbatches) * setup.recipe.pipeline.num_chunks, costs=costs)
        measured = [_planned(setup, name, case, num_tokens) for name in names]
        for repetition in range(repetitions + 1):
            for entry in measured:
                if repetition:
                    engine.grant_weight_cache(entry.cache_bytes)
                    engine.unpack_per_visit(setup.unpacks_once and not entry.holds_all)
                    if entry.cache_bytes:  # the weights come with a step before
                        engine.run_step(microbatches, entry.predicted.schedule, step=0)
                result = engine.run_step(microbatches, entry.predicted.schedule, step=0)
                ran(result)
                if repetition:
                    entry.steps.append(result)
                    continue
                words = _settle(setup, entry, result)  # after the first round, which warms up
                if words is not None:
                    say(f"{entry.name}: {words}")
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


def _planned(setup: Setup, name: ScheduleName, own: SimulationCase, num_tokens: int) -> Measured:
    """A schedule with the stages that a run of the recipe with it would have, simulated; `own`: that of the recipe."""
    recipe, counts = with_schedule(setup.recipe, name), (own.num_workers, own.num_microbatches)
    stays = setup.devices[0] == "cpu" and recipe.may_hold_all_weights and own.num_workers > 1
    case = case_for(recipe.pipeline, own.costs, counts, own.limits, weights_stay=stays)
    given = given_cut(recipe.pipeline, case.num_workers)
    cut = choose(name, case, effort="quick") if given is None else in_long_rounds(given, case)
    return Measured(name, run(name, cut, case), cut, case, num_tokens=num_tokens)


def _settle(setup: Setup, entry: Measured, result: StepResult) -> str | None:
    """Decide by a step what weights stay on GPUs between the schedule's steps, as a run with it would; stages that suit
    it and the prediction change with it. Returns what was chosen to stay, in words; None: nothing was."""
    schedule = entry.predicted.schedule
    is_open, fixed_bytes = is_cache_open(setup), weight_cache_bytes(setup.recipe.pipeline)
    kept = None
    if is_open:
        trained_bytes = trained_weight_bytes(replace(setup, recipe=with_schedule(setup.recipe, entry.asked)))
        reserved_bytes = result.device_reserved_bytes
        kept = weights_to_keep(entry.case.costs, schedule, reserved_bytes, setup.devices, trained_bytes=trained_bytes)
    elif fixed_bytes and setup.devices[0] != "cpu":
        kept = KeptWeights(fixed_bytes, schedule, entry.case.costs)
    if kept is None:
        return None
    entry.cache_bytes, entry.holds_all = kept.num_bytes, kept.cut is not None
    item_bytes = setup.store.layouts[0].trainable_dtype.itemsize
    costs = kept.costs if entry.holds_all else with_cached_weights(kept.costs, kept.num_bytes, item_bytes)
    entry.case = replace(entry.case, costs=costs)
    entry.predicted = run(schedule.name, kept.cut or entry.cut, entry.case)
    return kept.words if is_open else None


Ran = Callable[[StepResult], None]
"""Is told of each step when it has just ended."""


def _teller(tell: Tell, clock: Callable[[], float], num_steps: int, num_tokens: int, *, arithmetic: Arithmetic) -> Ran:
    taken: list[float] = []

    def ran(result: StepResult) -> None:
        taken.append(result.step_s)
        step = len(taken)
        tell_notices(tell, *result.notices)
        tell(step_timeline(result, step, clock))
        tell(
            StepFinished(
                step=step,
                num_steps=num_steps,
                learning_rate=0.0,
                utilization=result.utilization,
                eta_s=statistics.median(taken) * (num_steps - step),
                **step_figures(result, num_tokens, result.step_s, arithmetic),
            )
        )

    return ran


def profile(
    engine: Engine, setup: Setup, microbatches: Sequence[Microbatch], rough: CostModel, *, ran: Ran
) -> CostModel:
    """Costs of the layers, `rough` before, measured by steps with one layer a stage."""
    chunks = setup.recipe.pipeline.num_chunks
    schedule = profile_schedule(engine.num_layers, engine.num_workers, len(microbatches) * chunks, chunks)
    steps = []
    for _ in range(PROFILE_STEPS + 1):
        result = engine.run_step(microbatches, schedule, step=0)
        steps.append(result.timeline)
        ran(result)
    speeds = measured_speeds(rough, steps[1:], engine.num_workers) if engine.num_workers > 1 else None
    return measured_costs(replace(rough, worker_speed=speeds), steps[1:])


def check_losses(measured: Sequence[Measured], tolerance: float) -> None:
    """Raise an InternalError for two schedules that do not compute the same."""
    first = measured[0]
    for entry in measured[1:]:
        if abs(entry.loss - first.loss) > tolerance * abs(first.loss):
            raise InternalError(
                "two schedules give different losses",
                found=f"{first.name} {first.loss}, {entry.name} {entry.loss}",
                expected=f"equal within {tolerance:g} relative",
            )
