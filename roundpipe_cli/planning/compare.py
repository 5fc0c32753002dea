"""One model and machine under several schedules: what `roundpipe bench` prints. Seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from roundpipe_cli.choices import SCHEDULE_KINDS
from roundpipe_cli.costs.cost import CostModel, StageRange, share_out_visits, without_bytes
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.search.stages import StageLimits
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule, place_on
from roundpipe_cli.schedule.simulate import simulate, simulated_step_s
from roundpipe_cli.schedule.timeline import Bubble, Timeline, bubble, busy_s, chained_step_s, makespan_s


@dataclass(frozen=True)
class SimulationCase:
    """A model on a machine, for which a schedule gets stages and is simulated.

    `plan`, `bench` and a run ask for stages by equal cases where costs and machine are equal (`choose.case_for`).
    """

    costs: CostModel
    num_workers: int
    num_microbatches: int
    """Microbatches of a step."""
    accounting: Literal["default", "published"] = "default"
    staleness: Literal[0, 1] = 0
    num_steps: int = 1
    """Chained steps that give the time per step: 1, or an even number."""
    options: Options = Options()
    """How roundpipe deals out its stages; the other schedules bind theirs."""
    auto_dealing: bool = True
    """Whether the planner may deal stages out in another way where `options` are the defaults."""
    may_split: bool = True
    """Whether that may let several workers hold a stage with blocks at a time."""
    auto_head: bool = False
    """Whether the planner may share out a frozen head's microbatches where `options` are the defaults."""
    sequence_chunks: int = 1
    """Consecutive microbatches that are one sequence; see `Schedule`."""
    limits: StageLimits | None = None
    """Limits of stages and of rounds; None: `costs.device_memory_bytes` alone."""
    weights_stay: bool = False
    """Workers read all weights in place, so a microbatch may stay on one worker."""


@dataclass(frozen=True)
class StageCut:
    """Stages in execution order, and microbatches per round where there are rounds."""

    forward_stages: tuple[StageRange, ...]
    backward_stages: tuple[StageRange, ...]
    microbatches_per_round: int | None = None
    workers: tuple[int, ...] = ()
    """The workers that get stages; empty: all. The planner leaves idle those that would not make a step faster."""
    dealing: Options | None = None
    """How roundpipe deals out stages; None: as the case says."""
    explanation: tuple[str, ...] = ()
    """Reasons for these stages, a sentence each."""

    @property
    def last_forward(self) -> int:
        """The last layer of the forward stages; those behind it are computed once. -1: there are no such stages."""
        return max((last for _, last in self.forward_stages), default=-1)


@dataclass(frozen=True)
class Result:
    """Figures of one schedule."""

    schedule: Schedule
    """Schedule of the first step."""
    timeline: Timeline
    """Timeline of the first step."""
    makespan_s: float
    """Makespan of one step, at staleness 0 from the end of the step before to its own."""
    parts: Bubble
    step_s: float
    microbatches_per_round: int
    dealing: Options
    """How roundpipe's stages were dealt out."""


def check_case(case: SimulationCase) -> None:
    """Refuse counts that make no sense.

    Raises:
        RefusedError: which, and what was expected.
    """
    for what, count in (("--workers", case.num_workers), ("--microbatches", case.num_microbatches)):
        if count < 1:
            raise RefusedError(f"{what} must be at least 1", found=str(count), expected="1 or more")
    steps = case.num_steps
    if steps < 1 or (steps > 1 and steps % 2):
        raise RefusedError(
            "--steps must be 1 or even: the time per step is (makespan of K steps - of K/2) / (K/2)",
            found=str(steps),
            expected="1, 2, 4, ...",
        )
    speeds = case.costs.worker_speed
    if speeds is not None and len(speeds) != case.num_workers:
        raise RefusedError(
            "worker_speed does not name every worker",
            where=f"costs {case.costs.name}",
            found=f"{len(speeds)} speeds",
            expected=f"{case.num_workers}",
        )


def costs_per_microbatch(name: str, case: SimulationCase, cut: StageCut | None = None) -> CostModel:
    """The case's costs, with the work that a visit does once shared out over its microbatches.

    Args:
        cut: None: rounds as short as there can be, dealt out as the case says.
    """
    per_round = cut.microbatches_per_round if cut is not None else None
    dealing = (cut.dealing if cut is not None else None) or case.options
    kind, per_visit = SCHEDULE_KINDS[name], float(case.num_microbatches)
    if not kind.takes_chunks:  # visits alternate, and only one visit's weights stay unpacked
        per_visit = 1.0
    elif not kind.binds_stages:
        per_visit /= math.ceil(case.num_microbatches / max(1, per_round or case.num_workers))
        if dealing.splits_stages:
            per_visit = max(1.0, per_visit / case.num_workers)
    return share_out_visits(case.costs, per_visit)


def run(name: str, cut: StageCut, case: SimulationCase) -> Result:
    """Simulate one schedule.

    Raises:
        RefusedError: stages that do not suit the schedule.
    """
    case = replace(case, costs=costs_per_microbatch(name, case, cut))
    first = _timed(name, cut, case, 1)
    makespan = makespan_s(first[1])
    step_s = makespan
    if case.num_steps > 1:
        half = case.num_steps // 2
        span_s = [makespan_s(_timed(name, cut, case, count)[1]) for count in (half, case.num_steps)]
        speeds = case.costs.worker_speed or (1.0,) * case.num_workers
        step_s = chained_step_s(busy_s(first[1]), (span_s[0], span_s[1]), half, speeds)
    published = case.accounting == "published"
    per_round = case.num_workers if published else first[0].microbatches_per_round
    dealing = cut.dealing or case.options
    return Result(first[0], first[1], makespan, bubble(first[1]), step_s, per_round, dealing)


def run_step_s(name: str, cut: StageCut, case: SimulationCase) -> float:
    """`step_s` of what `run` returns, without its figures: for searches.

    Raises:
        RefusedError: as `run`.
    """
    if case.num_steps > 1:
        return run(name, cut, case).step_s
    case = replace(case, costs=costs_per_microbatch(name, case, cut))
    schedule = make_schedule(name, cut, case)
    return simulated_step_s(schedule, case.costs, accounting=case.accounting, staleness=case.staleness)


def make_schedule(name: str, cut: StageCut, case: SimulationCase, num_steps: int = 1) -> Schedule:
    """The schedule of `num_steps` chained steps.

    Raises:
        RefusedError: stages that do not suit the schedule.
    """
    published = case.accounting == "published"
    workers = cut.workers or tuple(range(case.num_workers))
    speeds = case.costs.worker_speed
    own_speeds = None if speeds is None else tuple(speeds[worker] for worker in workers)
    schedule = build_schedule(
        name,
        forward_stages=cut.forward_stages,
        backward_stages=cut.backward_stages,
        num_workers=len(workers),
        rounds=Rounds(
            case.num_microbatches,
            per_round=None if published else cut.microbatches_per_round,
            num_steps=num_steps,
            staleness=case.staleness,
            options=cut.dealing or case.options,
            sequence_chunks=case.sequence_chunks,
        ),
        costs=replace(without_bytes(case.costs) if published else case.costs, worker_speed=own_speeds),
    )
    return place_on(schedule, workers, case.num_workers)


def _timed(name: str, cut: StageCut, case: SimulationCase, num_steps: int) -> tuple[Schedule, Timeline]:
    schedule = make_schedule(name, cut, case, num_steps)
    after_update = case.staleness == 0 and num_steps == 1
    timeline = simulate(
        schedule, case.costs, accounting=case.accounting, staleness=case.staleness, after_update=after_update
    )
    return schedule, timeline


Keeps = Callable[[StageCut], bool]
"""Whether stages keep limits that are not in the case, such as the host's memory."""


# What `bench` says of a schedule. It is remembered, so it stands here: `answers.code_digest` reads this folder.

BUBBLE_PARTS = ("fill", "switch", "drain", "steady")


def schedule_figures(result: Result) -> dict[str, Any]:
    """One schedule's simulated figures as `--json` prints them. Seconds; the four parts sum to the bubble ratio."""
    return {
        "schedule": result.schedule.name,
        "round": result.microbatches_per_round,
        "makespan_s": result.makespan_s,
        "bubble_ratio": result.parts.ratio,
        **{part: getattr(result.parts, part) for part in BUBBLE_PARTS},
        "step_s": result.step_s,
        "forward_stages": [list(stage) for stage in result.schedule.forward_stages],
        "backward_stages": [list(stage) for stage in result.schedule.backward_stages],
    }


def row_of(result: Result) -> dict[str, Any]:
    """A row of `bench`, in JSON's types: a schedule's figures, how its stages are dealt, workers without any."""
    schedule, dealing = result.schedule, result.dealing
    shared = ", last stages shared" if dealing.shared_stages else ""
    held = {
        action.worker
        for row in schedule.actions
        for action in row
        for stages in [schedule.forward_stages if action.kind is Kind.FORWARD else schedule.backward_stages]
        if stages[action.stage][1] >= stages[action.stage][0]
    }
    return {
        "figures": schedule_figures(result),
        "dealing": ", earliest free" if dealing.earliest_free else shared,
        "num_idle": schedule.num_workers - len(held),
    }
