"""`roundpipe bench --costs F --run`: the engine's dispatcher carries the schedules out on emulated devices."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.engine.dispatch.emulate import Emulated, OnBegun, run_emulated
from roundpipe_cli.planning.compare import Result, SimulationCase, StageCut, make_schedule
from roundpipe_cli.units import counted, format_seconds

if TYPE_CHECKING:
    from roundpipe_cli.cli.bench_live import LiveRuns

Asked = tuple[str, StageCut, SimulationCase]
"""(schedule, its stages, its case)."""


@dataclass(frozen=True)
class MeasuredSchedule:
    """Medians over the repetitions."""

    makespan_s: float
    bubble_ratio: float
    late_s: float
    """Longest time that a worker waited for the host."""
    exposed_transfer_s: float
    step_s: float | None
    """Time per step over the chained steps; None for a single step."""


def run_emulated_bench(
    asked: Sequence[Asked], results: Sequence[Result], repetitions: int, json_output: bool, *, plain: bool = False
) -> None:
    """Run every schedule `repetitions` times, in turn, and print what was measured beside what was simulated.

    Args:
        plain: lines in place of a dashboard.
    """
    from roundpipe_cli.cli.bench_live import live_runs
    from roundpipe_cli.cli.output import say

    runs: list[list[Emulated]] = [[] for _ in asked]
    planned_s = _planned_s(asked, results, repetitions)
    say(f"running on emulated devices: about {format_seconds(max(1, round(sum(planned_s))))}")
    question = asked[0][2]
    with live_runs(question.costs.name, question.num_workers, planned_s, plain=plain or json_output) as live:
        for _ in range(repetitions):
            for entry, found in zip(asked, runs, strict=True):
                found.append(live.run(entry[0], _one(entry, 1)))
        steps_s = [_step_s(entry, live) for entry in asked]
    measured = [_summary(found, step_s) for found, step_s in zip(runs, steps_s, strict=True)]
    if json_output:
        _print_json(asked[0][2], results, measured)
    else:
        _print_table(asked[0][2], results, measured)


def _planned_s(asked: Sequence[Asked], results: Sequence[Result], repetitions: int) -> list[float]:
    """How long each run will take: the first steps, then half of the chained ones and all of them."""
    chained = [
        result.makespan_s + (count - 1) * result.step_s
        for (_, _, question), result in zip(asked, results, strict=True)
        for count in (question.num_steps // 2, question.num_steps)
        if question.num_steps > 1
    ]
    return repetitions * [result.makespan_s for result in results] + chained


def _one(entry: Asked, num_steps: int) -> Callable[[OnBegun | None], Emulated]:
    return lambda begun: emulate(*entry, num_steps, begun)


def emulate(
    name: str, partition: StageCut, question: SimulationCase, num_steps: int, begun: OnBegun | None = None
) -> Emulated:
    """`num_steps` chained steps of one schedule on emulated devices.

    Args:
        begun: is called when the workers start.
    """
    schedule = make_schedule(name, partition, question, num_steps)
    costs = _without_transfers(question.costs) if question.accounting == "published" else question.costs
    return run_emulated(schedule, costs, staleness=question.staleness, begun=begun)


def _without_transfers(costs: CostModel) -> CostModel:
    """The costs without bytes and updates, which the published rules leave out."""
    free = {"param_bytes": 0, "boundary_bytes": 0, "grad_bytes": 0, "optimizer_s": 0.0}
    return replace(costs, layers=tuple(replace(layer, **free) for layer in costs.layers))  # type: ignore[arg-type]


def _step_s(entry: Asked, live: LiveRuns) -> float | None:
    name, num_steps = entry[0], entry[2].num_steps
    if num_steps == 1:
        return None
    half = num_steps // 2
    spans_s = [
        live.run(f"{name}, {counted(count, 'step')}", _one(entry, count)).makespan_s for count in (half, num_steps)
    ]
    return (spans_s[1] - spans_s[0]) / half


def _summary(found: Sequence[Emulated], step_s: float | None) -> MeasuredSchedule:
    return MeasuredSchedule(
        statistics.median(run.makespan_s for run in found),
        statistics.median(run.bubble_ratio for run in found),
        statistics.median(max(run.late_s) for run in found),
        statistics.median(run.transfers.exposed_s for run in found),
        step_s,
    )


def _print_json(question: SimulationCase, results: Sequence[Result], measured: Sequence[MeasuredSchedule]) -> None:
    import json

    import typer

    from roundpipe_cli.cli.bench_results import bench_document

    found: dict[str, Any] = bench_document(question, list(results))
    for entry, item in zip(found["results"], measured, strict=True):
        entry["measured_makespan_s"] = item.makespan_s
        entry["measured_bubble_ratio"] = item.bubble_ratio
        entry["late_s"] = item.late_s
        entry["exposed_transfer_s"] = item.exposed_transfer_s
        if item.step_s is not None:
            entry["measured_step_s"] = item.step_s
    typer.echo(json.dumps(found))


def _print_table(question: SimulationCase, results: Sequence[Result], measured: Sequence[MeasuredSchedule]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{question.costs.name}: {question.num_workers} emulated workers, {question.num_microbatches} "
        f"microbatches ({question.accounting} accounting)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("schedule", no_wrap=True)
    for heading in ("makespan", "simulated", "off", "bubble", "simulated", "exposed", "late"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result, item in zip(results, measured, strict=True):
        table.add_row(
            result.schedule.name,
            format_seconds(item.makespan_s),
            format_seconds(result.makespan_s),
            f"{100 * (item.makespan_s / result.makespan_s - 1):+.1f} %",
            f"{100 * item.bubble_ratio:.1f} %",
            f"{100 * result.parts.ratio:.1f} %",
            format_seconds(item.exposed_transfer_s),
            f"{100 * item.late_s / item.makespan_s:.1f} %",
        )
    console = Console()
    console.print(table)
    for result, item in zip(results, measured, strict=True):
        if item.step_s is not None:
            off = 100 * (item.step_s / result.step_s - 1)
            console.print(
                f"{result.schedule.name}: {format_seconds(item.step_s)} per chained step, simulated "
                f"{format_seconds(result.step_s)} ({off:+.1f} %)"
            )
