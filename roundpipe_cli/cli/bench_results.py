"""Results of `roundpipe bench` as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundpipe_cli.planning.compare import Result, SimulationCase


def bench_document(question: SimulationCase, results: list[Result]) -> dict[str, Any]:
    """The document that `--json` prints. Seconds; the four parts sum to the bubble ratio."""
    return {
        "workers": question.num_workers,
        "microbatches": question.num_microbatches,
        "results": [entry(result) for result in results],
    }


def entry(result: Result) -> dict[str, Any]:
    """One schedule's simulated figures as `--json` prints them."""
    return {
        "schedule": result.schedule.name,
        "round": result.microbatches_per_round,
        "makespan_s": result.makespan_s,
        "bubble_ratio": result.parts.ratio,
        "fill": result.parts.fill,
        "switch": result.parts.switch,
        "drain": result.parts.drain,
        "steady": result.parts.steady,
        "step_s": result.step_s,
        "forward_stages": [list(stage) for stage in result.schedule.forward_stages],
        "backward_stages": [list(stage) for stage in result.schedule.backward_stages],
    }


def directions(result: Result) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Stages of a result, forward and backward, in the order in which they run."""
    return result.schedule.forward_stages, result.schedule.backward_stages
