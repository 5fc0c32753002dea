"""Properties of the simulator, over drawn models, machines and schedules."""

from __future__ import annotations

from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.choices import SCHEDULE_KINDS, SCHEDULES
from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Options, Rounds, build_schedule
from roundpipe_cli.schedule.program import Program, lower
from roundpipe_cli.schedule.simulate import host_s, simulate, simulate_program, simulated_step_s
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, UP, Timeline, busy_s, makespan_s
from tests.support.schedules import parse_rows, validate_schedule

MIB = 1024**2
SECONDS = st.floats(0.001, 5.0)


@st.composite
def cuts(draw: st.DrawFn, num_layers: int, num_stages: int) -> list[StageRange]:
    """Any cut of layers 0 .. num_layers - 1 into `num_stages` stages, some perhaps empty."""
    borders = sorted(draw(st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1)))
    return [(first, end - 1) for first, end in zip([0, *borders], [*borders, num_layers], strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, CostModel, int]:
    """(schedule, costs, staleness), small."""
    num_layers = draw(st.integers(2, 8))
    sizes, updates = st.sampled_from([0, 20 * MIB, 300 * MIB]), st.sampled_from([0.0, 0.5])
    layers = []
    for index in range(num_layers):
        name, is_last = "embed" if index == 0 else f"layer {index}", index == num_layers - 1
        seconds, held = [draw(SECONDS), draw(SECONDS)], {"param_bytes": draw(sizes), "grad_bytes": draw(sizes)}
        held |= {"boundary_bytes": 0 if is_last else draw(sizes), "activation_bytes": draw(sizes)}
        layers.append(LayerCost(name, *seconds, recompute=not is_last, **held, optimizer_s=draw(updates)))
    num_workers = draw(st.integers(1, 4))
    speeds = draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_workers, max_size=num_workers))
    links = {"hop_s": draw(st.sampled_from([0.0, 0.01, 0.7])), "link_bytes_per_s": draw(st.sampled_from([50e6, 1e9]))}
    speed = tuple(speeds) if speeds else None
    costs = CostModel("drawn", tuple(layers), **links, slots=draw(st.integers(1, 3)), worker_speed=speed)
    name = draw(st.sampled_from(SCHEDULES))
    per_round, options = None, Options()
    if name == "roundpipe":
        head_first = draw(st.integers(0, num_layers - 1))
        num_backward = draw(st.integers(1, head_first)) if head_first else 0
        forward = draw(cuts(head_first, draw(st.integers(1, num_layers)))) if head_first else []
        later = reversed(draw(cuts(head_first, num_backward))) if num_backward else []
        stages: Any = {"forward_stages": forward, "backward_stages": [(head_first, num_layers - 1), *later]}
        per_round = draw(st.none() | st.integers(1, 6))
        options = Options(draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(0, 4)))
    else:
        looped = (
            2 if not SCHEDULE_KINDS[name].one_stage_each and num_layers > num_workers and draw(st.booleans()) else 1
        )
        stages = {"forward_stages": draw(cuts(num_layers, num_workers * looped))}
    staleness = draw(st.integers(0, 1))
    rounds = Rounds(draw(st.integers(1, 6)), per_round, draw(st.integers(1, 3)), staleness, options=options)
    return build_schedule(name, **stages, num_workers=num_workers, rounds=rounds, costs=costs), costs, staleness


def longest_path_s(program: Program, durations: list[float], hop_s: float) -> float:
    """Longest chain of `deps`, as if every operation had a resource of its own."""
    end = [0.0] * len(program.ops)
    for op_id in TopologicalSorter({op.id: op.deps for op in program.ops}).static_order():
        op = program.ops[op_id]
        arrivals = [
            end[dep] + (hop_s if program.ops[dep].worker not in (op.worker, -1) and op.worker >= 0 else 0.0)
            for dep in op.deps
        ]
        end[op_id] = max(arrivals, default=0.0) + durations[op_id]
    counted = [op.id for op in program.ops if not (op.kind is Kind.OPTIMIZER and program.staleness)]
    return max((end[op_id] for op_id in counted if durations[op_id]), default=0.0)


def durations_of(program: Program, costs: CostModel, timeline: Timeline) -> list[float]:
    spans = {(i.kind, i.stage, i.microbatch): i.end_s - i.start_s for i in timeline.intervals if i.lane == COMPUTE}
    return [
        spans[op.kind, op.stage, op.microbatch]
        if op.lane == COMPUTE
        else host_s(op, costs)
        if op.kind is Kind.OPTIMIZER
        else op.num_bytes / costs.link_bytes_per_s
        for op in program.ops
    ]


def link_busy_s(timeline: Timeline, lane: str) -> list[float]:
    """Seconds in which each worker's link moved bytes, in one direction (`UP` or `DOWN`)."""
    busy = [0.0] * timeline.num_workers
    for interval in timeline.intervals:
        if interval.lane == lane and interval.worker >= 0:
            busy[interval.worker] += interval.end_s - interval.start_s
    return busy


@settings(max_examples=50, deadline=None)
@given(cases())
def test_no_faster_than_the_longest_path_and_the_busiest_resource(case: tuple[Schedule, CostModel, int]) -> None:
    schedule, costs, staleness = case
    program = lower(schedule, costs, staleness=staleness)
    timeline = simulate_program(program, costs)
    assert timeline == simulate(schedule, costs, staleness=staleness)
    makespan = makespan_s(timeline)
    slack = 1 + 1e-9
    assert makespan * slack >= max(busy_s(timeline))
    assert makespan * slack >= max(link_busy_s(timeline, UP))
    assert makespan * slack >= max(link_busy_s(timeline, DOWN))
    assert makespan * slack >= longest_path_s(program, durations_of(program, costs, timeline), costs.hop_s)
    total = sum(op.num_bytes for op in program.ops)
    moved = (sum(link_busy_s(timeline, UP)) + sum(link_busy_s(timeline, DOWN))) * costs.link_bytes_per_s
    assert moved == pytest.approx(total, rel=1e-6, abs=1)
    # a tensor with bytes passes by stages without layers, and their hops
    if all(last >= first for first, last in (*schedule.forward_stages, *schedule.backward_stages)):
        assert makespan * slack >= makespan_s(simulate(schedule, costs, accounting="published", staleness=staleness))


def chained(schedule: Schedule, num_steps: int) -> Schedule:
    """The first step of `schedule` so many times."""
    count = schedule.num_microbatches
    rows = [[action for action in row if action.microbatch < count] for row in schedule.actions]
    repeated = tuple(
        tuple(one._replace(microbatch=one.microbatch + step * count) for step in range(num_steps) for one in row)
        for row in rows
    )
    return replace(schedule, actions=repeated, num_steps=num_steps)


@settings(max_examples=37, deadline=None)
@given(cases(), st.sampled_from(["default", "published"]))
def test_searches_get_the_makespan_of_the_timeline(case: tuple[Schedule, CostModel, int], accounting: str) -> None:
    schedule, costs, staleness = case
    schedule = schedule if staleness else chained(schedule, 1)
    timeline = simulate(schedule, costs, accounting=accounting, staleness=staleness, after_update=staleness == 0)
    quick_s = simulated_step_s(schedule, costs, accounting=accounting, staleness=staleness)
    assert quick_s == makespan_s(timeline)


@settings(max_examples=25, deadline=None)
@given(cases(), st.booleans())
def test_a_step_after_another_takes_what_it_adds_to_it(case: tuple[Schedule, CostModel, int], tied: bool) -> None:
    schedule, costs, _ = case
    if any(last < first for first, last in (*schedule.forward_stages, *schedule.backward_stages)):
        return  # the step's last action may take no time, and then the makespan leaves out its hop
    costs = replace(costs, tied=tied)
    one, two = (chained(schedule, count) for count in (1, 2))
    added_s = makespan_s(simulate(two, costs)) - makespan_s(simulate(one, costs))
    assert simulated_step_s(one, costs) == pytest.approx(added_s, rel=1e-9, abs=1e-9)


@settings(max_examples=37, deadline=None)
@given(cases())
def test_dependencies_and_lanes_are_kept(case: tuple[Schedule, CostModel, int]) -> None:
    schedule, costs, staleness = case
    validate_schedule(schedule)
    assert parse_rows(str(schedule)) == schedule.actions
    timeline = simulate(schedule, costs, staleness=staleness)
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    for interval in timeline.intervals:
        lanes.setdefault((interval.worker, interval.lane), []).append((interval.start_s, interval.end_s))
        if interval.lane == COMPUTE and interval.kind is not Kind.RECOMPUTE:
            ends = forward if interval.kind is Kind.FORWARD else backward
            ends[interval.stage, interval.microbatch] = interval.end_s
    for spans in lanes.values():
        spans.sort()
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in zip(spans, spans[1:], strict=False))
    for interval in timeline.intervals:
        if interval.lane == COMPUTE and interval.stage and interval.kind is not Kind.RECOMPUTE:
            ends = forward if interval.kind is Kind.FORWARD else backward
            empty = schedule.forward_stages[interval.stage - 1] if ends is forward else (0, 0)
            if empty[1] >= empty[0]:  # the input of an empty stage comes straight from its maker
                assert interval.start_s >= ends[interval.stage - 1, interval.microbatch] - 1e-9
