"""A costs file's schedules, carried out by the engine's dispatcher on emulated devices: measured against simulated.

    python scripts/bench_emulated.py --costs recipes/example_costs.json --workers 8 --microbatches 16 --json
    python scripts/bench_emulated.py --costs FILE --workers 4 --microbatches 8 --schedule roundpipe --head-workers 4
    python scripts/bench_emulated.py --recipe recipes/qwen3/8b_full_8x24gb.yaml --recipe recipes/qwen3-32b.yaml

The schedules and stages are those that `roundpipe bench --costs` simulates, and its flags mean the same here. More
flags switch on options of roundpipe, which change its costs or how it deals out its stages; the other schedules stay as
they are. `--json` prints the document of `bench` with what was measured in each result: `measured_makespan_s`,
`measured_bubble_ratio`, `late_s` (the longest time that a worker lost because the host issued too late),
`exposed_transfer_s` and, with `--steps`, `measured_step_s`. A run sleeps as long as its schedule takes.

`--recipe`, in place of all other flags, carries out the step that `plan` predicts for a recipe, on the hardware of its
header, as it follows another step: with `plan`'s stages and dealing, a trained head on all workers included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from roundpipe_cli.choices import BOUND_SCHEDULES
from roundpipe_cli.cli.bench_schedules import CaseFlags, bench_document, case_of_costs, named_schedules
from roundpipe_cli.cli.output import run_command, say
from roundpipe_cli.costs.cost import CostModel, keep_activations, skip_projections
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.choose import choose, in_long_rounds
from roundpipe_cli.planning.compare import (
    Result,
    SimulationCase,
    StageCut,
    check_case,
    make_schedule,
    run,
    schedule_figures,
)
from roundpipe_cli.planning.predict import make_plan, stage_case, step_costs
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.simulate import simulated_step_s
from roundpipe_cli.units import format_seconds
from tests.support.emulated import Emulated, run_emulated

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


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="costs file (JSON, seconds)")
    parser.add_argument("--recipe", action="append", help="a recipe's planned step; may be given several times")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--microbatches", type=int, help="of a step")
    parser.add_argument("--schedule", action="append", help="may be given several times; default: all")
    parser.add_argument("--forward-stages", help="JSON, [[0, 3], [4, 7], ...]; otherwise they are planned")
    parser.add_argument("--backward-stages", help="JSON, the one with the head first (roundpipe only)")
    parser.add_argument("--steps", type=int, help="chained optimizer steps: 1, or an even number")
    parser.add_argument("--staleness", type=int, choices=[0, 1], help="updates that the weights of a step lag")
    parser.add_argument("--published", action="store_true", help="the published accounting: no transfers, no updates")
    parser.add_argument("--repetitions", type=int, default=1, help="rounds, in which each schedule is run once")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    only = parser.add_argument_group("roundpipe only")
    only.add_argument("--head-workers", type=int, default=1, help="workers that share the stage with the head")
    only.add_argument("--earliest-free", action="store_true", help="a microbatch goes where it can start first")
    only.add_argument("--skip-projection", action="store_true", help="recompute without a block's last projection")
    only.add_argument("--keep-activations", type=int, default=0, help="last so many blocks that are not recomputed")
    return parser.parse_args(words)


def asked_cases(args: argparse.Namespace) -> list[Asked]:
    """Each schedule with its stages and its case.

    Raises:
        RefusedError: costs, counts, stages or flags that do not go together.
    """
    if args.costs is None:
        raise RefusedError("nothing to run", expected="--costs or --recipe")
    flags = CaseFlags(args.workers, args.microbatches, args.staleness, args.steps)
    flags.check()
    question = case_of_costs(args.costs, flags)
    question = replace(question, accounting="published", limits=None) if args.published else question
    check_case(question)
    changed = changed_case(question, args)
    cuts = asked_cuts(args, question)
    check_schedules(args, [name for name, _ in cuts])
    cases = [changed if name not in BOUND_SCHEDULES else question for name, _ in cuts]
    return [(name, cut or choose(name, case), case) for (name, cut), case in zip(cuts, cases, strict=True)]


def asked_cuts(args: argparse.Namespace, case: SimulationCase) -> list[tuple[str, StageCut | None]]:
    """The schedules with the stages that were given, in rounds as long as a run's; None: they are to be planned."""
    names = named_schedules(args.schedule, case.sequence_chunks)
    if args.forward_stages is None:
        return [(name, None) for name in names]
    given = (json.loads(text or "[]") for text in (args.forward_stages, args.backward_stages))
    cut = StageCut(*(tuple((first, last) for first, last in stages) for stages in given))
    long = in_long_rounds(replace(cut, microbatches_per_round=case.num_workers), case)
    return [(name, cut if name in BOUND_SCHEDULES or args.published else long) for name in names]


def words_of(args: argparse.Namespace) -> str:
    """The flags that change how roundpipe works, as they were typed."""
    flags = {
        f"--head-workers {args.head_workers}": args.head_workers != 1,
        "--earliest-free": args.earliest_free,
        "--skip-projection": args.skip_projection,
        f"--keep-activations {args.keep_activations}": args.keep_activations != 0,
    }
    return " ".join(flag for flag, is_on in flags.items() if is_on)


def check_schedules(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse flags that would change nothing; bound schedules that `--schedule` does not name are for comparison.

    Raises:
        RefusedError: a bound schedule was asked for, or roundpipe is not simulated at all.
    """
    on, bound = words_of(args), [name for name in names if name in BOUND_SCHEDULES]
    if on and bound and (args.schedule or len(bound) == len(names)):
        raise RefusedError(
            f"{on}: only roundpipe has this",
            found=f"also {', '.join(bound)}" if len(bound) < len(names) else ", ".join(bound),
            expected="--schedule roundpipe, or no --schedule at all",
            hint=f"leave {on} out, or add --schedule roundpipe",
        )


def changed_case(question: SimulationCase, args: argparse.Namespace) -> SimulationCase:
    """The case for roundpipe; unchanged if all its flags are off.

    Raises:
        RefusedError: values that mean nothing for these workers and costs.
    """
    if not 1 <= args.head_workers <= question.num_workers:
        raise RefusedError(
            "--head-workers does not suit the workers",
            found=str(args.head_workers),
            expected=f"1 to {question.num_workers}",
            hint="1 is the default: one worker computes the head",
        )
    if args.earliest_free and args.head_workers != 1:
        raise RefusedError(
            "--earliest-free deals out each microbatch separately, which leaves no fixed share to a worker",
            found=words_of(args),
            expected="--earliest-free, or --head-workers",
            hint="leave one of the two out",
        )
    costs = _kept(question.costs, args.keep_activations)
    if args.skip_projection:
        costs = _skipped(costs)
    return replace(question, costs=costs, options=Options(args.head_workers, args.earliest_free))


def _kept(costs: CostModel, count: int) -> CostModel:
    """Without the recompute of the last `count` recomputed layers: backward needs their activations soonest."""
    recomputed = [index for index, layer in enumerate(costs.layers) if layer.recompute]
    if not 0 <= count <= len(recomputed):
        raise RefusedError(
            "--keep-activations does not suit the layers",
            where=f"costs {costs.name}",
            found=str(count),
            expected=f"0 to {len(recomputed)}, the layers that are recomputed",
            hint="0 keeps none, which is the default",
        )
    return keep_activations(costs, recomputed[len(recomputed) - count :]) if count else costs


def _skipped(costs: CostModel) -> CostModel:
    if not any(layer.recompute and layer.recompute_skippable_s for layer in costs.layers):
        raise RefusedError(
            "--skip-projection: nothing in the recompute can be left out",
            where=f"costs {costs.name}",
            found="no recomputed layer with recompute_skippable_s",
            expected="recompute_skippable_s, in seconds, in at least one layer",
            hint="leave --skip-projection out, or add the key to the costs file (scripts/README.md describes it)",
        )
    return skip_projections(costs)


def measure(asked: Sequence[Asked], results: Sequence[Result], repetitions: int) -> list[MeasuredSchedule]:
    """Run every schedule `repetitions` times, in turn, then half of its chained steps and all of them."""
    say(f"running on emulated devices: about {format_seconds(max(1, round(planned_s(asked, results, repetitions))))}")
    runs: list[list[Emulated]] = [[] for _ in asked]
    for _ in range(repetitions):
        for entry, found in zip(asked, runs, strict=True):
            found.append(emulate(*entry, 1))
    return [
        MeasuredSchedule(
            statistics.median(run.makespan_s for run in found),
            statistics.median(run.bubble_ratio for run in found),
            statistics.median(max(run.late_s) for run in found),
            statistics.median(run.exposed_s for run in found),
            chained_s(entry),
        )
        for entry, found in zip(asked, runs, strict=True)
    ]


def planned_s(asked: Sequence[Asked], results: Sequence[Result], repetitions: int) -> float:
    """How long all runs will take."""
    chained = sum(
        result.makespan_s + (count - 1) * result.step_s
        for (_, _, case), result in zip(asked, results, strict=True)
        for count in (case.num_steps // 2, case.num_steps)
        if case.num_steps > 1
    )
    return repetitions * sum(result.makespan_s for result in results) + chained


def emulate(name: str, cut: StageCut, case: SimulationCase, num_steps: int) -> Emulated:
    """`num_steps` chained steps of one schedule on emulated devices."""
    schedule = make_schedule(name, cut, case, num_steps)
    costs = _without_transfers(case.costs) if case.accounting == "published" else case.costs
    return run_emulated(schedule, costs, staleness=case.staleness, after_update=case.staleness == 0 and num_steps == 1)


def _without_transfers(costs: CostModel) -> CostModel:
    """The costs without bytes and updates, which the published rules leave out."""
    free = {"param_bytes": 0, "boundary_bytes": 0, "grad_bytes": 0, "optimizer_s": 0.0}
    return replace(costs, layers=tuple(replace(layer, **free) for layer in costs.layers))


def chained_s(entry: Asked) -> float | None:
    """Time per step over the chained steps; None for a single step."""
    num_steps = entry[2].num_steps
    if num_steps == 1:
        return None
    half = num_steps // 2
    spans_s = [emulate(*entry, count).makespan_s for count in (half, num_steps)]
    return (spans_s[1] - spans_s[0]) / half


def print_recipes(names: Sequence[str]) -> None:
    """The planned step of each recipe, emulated and simulated."""
    print("| recipe | dealing | simulated | emulated | off | late |\n|---|---|---:|---:|---:|---:|")
    for name in names:
        plan = make_plan(load_recipe(name, ()))
        costs = step_costs(plan.question, plan.cut)
        schedule = make_schedule("roundpipe", plan.cut, replace(stage_case(plan.question), costs=costs))
        simulated_s = simulated_step_s(schedule, costs)
        found = run_emulated(schedule, costs, after_update=True)
        usual, options = asdict(Options()), asdict(plan.cut.dealing or Options())
        dealing = ", ".join(f"{key} {value}" for key, value in options.items() if value != usual[key])
        times = f"{simulated_s:.2f} s | {found.makespan_s:.2f} s | {100 * (found.makespan_s / simulated_s - 1):+.2f} %"
        print(f"| {name} | {dealing or 'in turn'} | {times} | {1000 * max(found.late_s):.0f} ms |", flush=True)


def print_json(case: SimulationCase, results: Sequence[Result], measured: Sequence[MeasuredSchedule]) -> None:
    found = bench_document(case, map(schedule_figures, results))
    for entry, item in zip(found["results"], measured, strict=True):
        entry["measured_makespan_s"] = item.makespan_s
        entry["measured_bubble_ratio"] = item.bubble_ratio
        entry["late_s"] = item.late_s
        entry["exposed_transfer_s"] = item.exposed_transfer_s
        if item.step_s is not None:
            entry["measured_step_s"] = item.step_s
    print(json.dumps(found))


def print_table(case: SimulationCase, results: Sequence[Result], measured: Sequence[MeasuredSchedule], on: str) -> None:
    table = Table(
        title=f"{case.costs.name}: {case.num_workers} emulated workers, {case.num_microbatches} microbatches "
        f"({case.accounting} accounting){f', roundpipe with {on}' if on else ''}",
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


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    if args.recipe:
        print_recipes(args.recipe)
        return
    if args.repetitions < 1:
        raise RefusedError("--repetitions must be at least 1", found=str(args.repetitions), expected="1 or more")
    asked = asked_cases(args)
    results = [run(*one) for one in asked]
    measured = measure(asked, results, args.repetitions)
    if args.json:
        print_json(asked[0][2], results, measured)
    else:
        print_table(asked[0][2], results, measured, words_of(args))


if __name__ == "__main__":
    sys.exit(run_command(main))
