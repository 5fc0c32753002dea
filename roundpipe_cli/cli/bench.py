"""`roundpipe bench`: pipeline schedules compared, by simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.bench_results import bench_document, directions
from roundpipe_cli.cli.output import say
from roundpipe_cli.units import counted

if TYPE_CHECKING:
    from rich.table import Table

    from roundpipe_cli.choices import ScheduleName
    from roundpipe_cli.cli.bench_options import CaseFlags, RoundpipeFlags
    from roundpipe_cli.planning.answers import Answers
    from roundpipe_cli.planning.choose import Effort
    from roundpipe_cli.planning.compare import Result, SimulationCase, StageCut
    from roundpipe_cli.planning.question import PlanRequest


def bench(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Recipe to take costs and counts from.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe's keys.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="Costs file (JSON, seconds) in place of a recipe.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of workers.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per step.")] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="Schedule to simulate; may be given several times. Default: all.")
    ] = None,
    forward_stages: Annotated[
        str | None, typer.Option(help="Forward stages as JSON, [[0, 3], [4, 7], ...]; otherwise they are planned.")
    ] = None,
    backward_stages: Annotated[
        str | None, typer.Option(help="Backward stages as JSON, the one with the head first (roundpipe only).")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Chained optimizer steps: 1, or an even number. Default: 1; a recipe's steps may overlap."),
    ] = None,
    staleness: Annotated[
        int | None,
        typer.Option(min=0, max=1, help="Updates that the weights of a step lag. Default: 0, or the recipe's."),
    ] = None,
    head_workers: Annotated[
        int, typer.Option(min=1, help="roundpipe: workers that share the microbatches of the stage with the head.")
    ] = 1,
    earliest_free: Annotated[
        bool,
        typer.Option("--earliest-free", help="roundpipe: each microbatch goes to the worker that can start first."),
    ] = False,
    skip_projection: Annotated[
        bool, typer.Option("--skip-projection", help="roundpipe: recompute without a block's last projection.")
    ] = False,
    keep_activations: Annotated[
        int, typer.Option(min=0, help="roundpipe: last so many blocks that keep their activations.")
    ] = 0,
    accounting: Annotated[str, typer.Option(help="default, or published: no transfers, no optimizer.")] = "default",
    hardware: Annotated[str | None, typer.Option(help="With a recipe: hardware such as 8x4090.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture with one row per schedule.")] = None,
    run_really: Annotated[
        bool,
        typer.Option("--run", help="Carry the schedules out on the recipe's devices, or emulated ones for --costs."),
    ] = False,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="With --run: alternating rounds. Default: 5, for --costs 1.")
    ] = None,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="With --run: plain lines instead of a dashboard.")
    ] = False,
) -> None:
    """Compare pipeline schedules on a recipe or a costs file.

    Example: roundpipe bench recipes/quickstart.yaml --run
    """
    if recipe or costs:
        say(f"reading {recipe or costs} ...")
    from roundpipe_cli.cli.bench_options import CaseFlags, RoundpipeFlags, changed_question

    flags = RoundpipeFlags(head_workers, earliest_free, skip_projection, keep_activations)
    if run_really and costs is None:
        from roundpipe_cli.cli.bench_measured import run_for_real

        plain = json_output or no_dashboard
        run_for_real(_to_run(recipe, flags), overrides or [], schedule, repetitions or 5, json_output, plain=plain)
        return
    from roundpipe_cli.choices import BOUND_SCHEDULES
    from roundpipe_cli.planning.answers import Answers
    from roundpipe_cli.planning.compare import check_case, run
    from roundpipe_cli.schedule.dealing import Options

    case_flags = CaseFlags(workers, microbatches, accounting, staleness, steps)
    question, request = _question(recipe, overrides or [], costs, hardware, case_flags)
    check_case(question)
    changed, question = changed_question(question, flags), replace(question, options=Options())
    answers = Answers()
    if request and not (forward_stages or backward_stages or flags.words()) and case_flags == CaseFlags():
        from roundpipe_cli.cli.bench_recipe import as_planned

        asked = as_planned(request, hardware, schedule, answers)
    else:
        partitions = _partitions(schedule, (forward_stages, backward_stages), question, changed, flags, answers)
        if request:
            say("note: with these flags no weights stay on GPUs, as `weight_cache: auto` would have them")
        asked = [(name, partition, question if name in BOUND_SCHEDULES else changed) for name, partition in partitions]
    needs_timelines = svg is not None or run_really
    results = [run(*one) if needs_timelines else _known_result(*one, answers) for one in asked]
    for damage in answers.damage:
        say(f"notice: {damage}")
    if svg is not None:
        _write_svg(svg, question, request.hardware.description if request else "", results)
    if run_really:
        from roundpipe_cli.cli.bench_emulated import run_emulated_bench

        run_emulated_bench(asked, results, repetitions or 1, json_output, plain=no_dashboard)
    elif json_output:
        import json

        typer.echo(json.dumps(bench_document(question, results)))
    else:
        _print_table(question, results, flags, _search_words(forward_stages, question))


def _known_result(name: str, cut: StageCut, case: SimulationCase, answers: Answers) -> Result:
    """The simulated schedule; without a timeline where its figures come from the cache."""
    from roundpipe_cli.planning.answers import result_document, result_from
    from roundpipe_cli.planning.compare import run

    return answers.once(
        ("simulated", name, cut, case),
        lambda: run(name, cut, case),
        result_document,
        lambda document: result_from(document, name, cut, case),
    )


def _known_cut(name: ScheduleName, case: SimulationCase, effort: Effort, answers: Answers) -> StageCut:
    """The planner's stages."""
    from roundpipe_cli.planning.answers import cut_document, cut_from
    from roundpipe_cli.planning.choose import choose

    asked = "chosen", name, case, effort
    return answers.once(
        asked,
        lambda: choose(name, case, effort=effort),
        cut_document,
        lambda document: cut_from(document, name, len(case.costs.layers), case.num_workers),
    )


def _to_run(recipe: str | None, flags: RoundpipeFlags) -> str:
    """The recipe that `--run` carries out.

    Raises:
        RefusedError: none is given, or flags that can only be simulated.
    """
    from roundpipe_cli.errors import RefusedError

    if flags.words():
        raise RefusedError(
            f"not yet supported: {flags.words()} with --run", hint="leave out --run to simulate what it gains"
        )
    if recipe is None:
        raise RefusedError("--run needs a recipe or a costs file", hint="roundpipe bench recipes/quickstart.yaml --run")
    return recipe


def _question(
    recipe: str | None, overrides: list[str], costs_file: Path | None, hardware: str | None, flags: CaseFlags
) -> tuple[SimulationCase, PlanRequest | None]:
    """The case to simulate, and the recipe's request that it is from; None with a costs file."""
    from roundpipe_cli.costs.cost import load_costs
    from roundpipe_cli.errors import RefusedError
    from roundpipe_cli.planning.compare import SimulationCase

    flags.check()
    if (recipe is None) == (costs_file is None):
        raise RefusedError(
            "bench needs a recipe or a costs file, one of them",
            found="both" if recipe else "neither",
            expected="roundpipe bench RECIPE, or roundpipe bench --costs FILE --workers 8 --microbatches 16",
            hint="roundpipe bench qwen3-8b --hardware 4x3090",
        )
    if costs_file is not None:
        num_workers, num_microbatches = flags.counts()
        return flags.applied_to(SimulationCase(load_costs(costs_file), num_workers, num_microbatches)), None
    assert recipe is not None
    from roundpipe_cli.cli.bench_recipe import request_of

    request = request_of(recipe, overrides, hardware)
    return flags.applied_to(_case_of(request)), request


def _case_of(request: PlanRequest) -> SimulationCase:
    """The case that a recipe describes: costs, workers and microbatches."""
    from roundpipe_cli.planning.predict import stage_case
    from roundpipe_cli.units import format_seconds

    host_s = request.settings.num_microbatches * request.analytic.host_s_per_microbatch
    if host_s:
        say(
            f"note: on top of every schedule, Python takes {format_seconds(host_s)} a step to start the operators; "
            "`plan` counts them"
        )
    return stage_case(request)


def _partitions(
    schedules: list[str] | None,
    given: tuple[str | None, str | None],
    question: SimulationCase,
    changed: SimulationCase,
    flags: RoundpipeFlags,
    answers: Answers,
) -> list[tuple[str, StageCut]]:
    """The schedules to simulate with their stages: given ones where they apply, planned ones otherwise.

    `changed` is the question with what `flags` say, which roundpipe is asked; the others are asked `question`.

    Given without backward stages, forward stages are those of bound schedules; with them, those of roundpipe. Without
    `--schedule` the schedules that they suit are simulated.
    """
    from roundpipe_cli.choices import BOUND_SCHEDULES, CHUNK_SCHEDULES, SCHEDULE_KINDS, SCHEDULES
    from roundpipe_cli.cli.bench_options import check_schedules
    from roundpipe_cli.errors import RefusedError
    from roundpipe_cli.planning.compare import StageCut
    from roundpipe_cli.schedule.builders import schedule_name

    forward, backward = given
    known = SCHEDULES if question.sequence_chunks == 1 else CHUNK_SCHEDULES
    names = list(dict.fromkeys(schedule_name(name) for name in schedules or known))
    if forward is None:
        if backward is not None:
            raise RefusedError(
                "--backward-stages without --forward-stages", hint="give both, or none to have them planned"
            )
        check_schedules(flags, names, bool(schedules))
        effort: Effort = "full" if question.limits is None else "quick"
        cases = [(name, question if name in BOUND_SCHEDULES else changed) for name in names]
        return [(name, _known_cut(name, case, effort, answers)) for name, case in cases]
    forward_ranges = _stages("--forward-stages", forward)
    backward_ranges = _stages("--backward-stages", backward) if backward is not None else ()
    if not schedules and backward is not None:
        names = [name for name in SCHEDULES if name not in BOUND_SCHEDULES]
    elif not schedules:
        one_each = len(forward_ranges) == question.num_workers
        names = [name for name in BOUND_SCHEDULES if one_each or not SCHEDULE_KINDS[name].one_stage_each]
    check_schedules(flags, names, bool(schedules))
    dealt = [name for name in names if name not in BOUND_SCHEDULES]
    if backward is None and dealt:
        what, hint = f"{dealt[0]} needs --backward-stages beside --forward-stages", "or neither: planned then"
        raise RefusedError(what, hint=hint)
    return [(name, StageCut(forward_ranges, backward_ranges)) for name in names]


_RANGES = "like '[[0, 3], [4, 7]]'"
_RANGES_HINT = "one [first, last] per stage, layers counted from 0, all in single quotes for the shell"


def _stages(flag: str, text: str) -> tuple[tuple[int, int], ...]:
    """Layer ranges from JSON such as `[[0, 3], [4, 7]]`."""
    import json

    from roundpipe_cli.errors import RefusedError

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{flag} is not JSON", found=str(error), expected=_RANGES, hint=_RANGES_HINT) from error
    good = isinstance(data, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair) for pair in data
    )
    if not good:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise RefusedError(f"{flag} is not a list of ranges", found=shown, expected=_RANGES, hint=_RANGES_HINT)
    return tuple((first, last) for first, last in data)


def _write_svg(path: Path, question: SimulationCase, machine: str, results: list[Result]) -> None:
    from roundpipe_cli.durable import write_named
    from roundpipe_cli.schedule.pictures import svg_picture
    from roundpipe_cli.units import format_seconds

    rows = []
    for result in results:
        title = f"{result.schedule.name}: {format_seconds(result.makespan_s)}, bubble {100 * result.parts.ratio:.1f} %"
        rows.append((title, result.timeline))
    basis = f" with the costs of {machine}" if machine else ""
    note = f"simulated{basis}, {question.accounting} accounting, one step"
    text = svg_picture(rows, heading=_case_words(question), note=note)
    write_named(path, text)


def _print_whole(table: Table) -> None:
    """Print a table with whole figures: without its last column where the terminal is too narrow for all."""
    from rich.console import Console

    console = Console()
    if not _fits(table, console.width):
        table.columns.pop()
        say("note: the terminal is too narrow for the parts of a bubble; --json has them")
    if not _fits(table, console.width):
        console = Console(width=_MOST_COLUMNS)  # wrapped lines are better than cut figures
        table.title = None
    console.print(table)


_MOST_COLUMNS = 1000


def _fits(table: Table, width: int) -> bool:
    from rich.console import Console

    return Console(width=_MOST_COLUMNS).measure(table).maximum <= width


def _case_words(question: SimulationCase) -> str:
    workers, microbatches = counted(question.num_workers, "worker"), counted(question.num_microbatches, "microbatch")
    return f"{question.costs.name}: {workers}, {microbatches}"


def _search_words(forward_stages: str | None, question: SimulationCase) -> str:
    """How the stages were found, for the table's title."""
    if forward_stages is not None:
        return "given stages"
    return "full search" if question.limits is None else "quick search, as by plan"


def _print_table(question: SimulationCase, results: list[Result], flags: RoundpipeFlags, search: str) -> None:
    from rich.table import Table

    from roundpipe_cli.units import format_seconds

    costs = question.costs
    on = f", roundpipe with {flags.words()}" if flags.words() else ""
    table = Table(
        title=f"{_case_words(question)}, simulated ({question.accounting} accounting, {search}){on}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages", "makespan", "step", "bubble", "  fill switch  drain steady"):
        table.add_column(heading, justify="right", no_wrap=True)
    best = min(results, key=lambda result: result.step_s) if len(results) > 1 else None
    for result in results:
        chosen = result.dealing.earliest_free and not flags.earliest_free
        stages = [sum(last >= first for first, last in ranges) for ranges in directions(result)]
        parts = result.parts
        shares = (parts.fill, parts.switch, parts.drain, parts.steady)
        table.add_row(
            f"{result.schedule.name}{', earliest free' if chosen else ''}",
            f"{stages[0]}+{stages[1]}",
            format_seconds(result.makespan_s),
            format_seconds(result.step_s),
            f"{100 * parts.ratio:.1f} %",
            " ".join(f"{100 * share:4.1f} %" for share in shares),
            style="green" if result is best else None,
        )
    _print_whole(table)
    for num_idle in sorted({_num_idle(result) for result in results} - {0}, reverse=True):
        names = ", ".join(result.schedule.name for result in results if _num_idle(result) == num_idle)
        say(
            f"note: {num_idle} of {counted(question.num_workers, 'worker')} have nothing to do, "
            f"with {len(costs.layers)} layers and {question.num_microbatches} microbatches: {names}"
        )


def _num_idle(result: Result) -> int:
    """Workers that get no layer of the model."""
    from roundpipe_cli.schedule.actions import Kind

    forward, backward = directions(result)
    held = {
        action.worker
        for row in result.schedule.actions
        for action in row
        for first, last in [(forward if action.kind is Kind.FORWARD else backward)[action.stage]]
        if last >= first
    }
    return result.schedule.num_workers - len(held)
