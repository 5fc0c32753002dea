"""`roundpipe bench`: pipeline schedules compared, by simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.choices import BOUND_SCHEDULES, ScheduleName
from roundpipe_cli.cli.output import say, say_data, say_json, terminal_width, wrapped
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import aligned, counted, format_seconds

if TYPE_CHECKING:
    from roundpipe_cli.cli.bench_options import CaseFlags
    from roundpipe_cli.planning.answers import Answers
    from roundpipe_cli.planning.choose import Effort
    from roundpipe_cli.planning.compare import Result, SimulationCase, StageCut
    from roundpipe_cli.planning.question import PlanRequest
    from roundpipe_cli.schedule.builders import Options


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
        int | None, typer.Option(help="Chained optimizer steps: 1, or an even number. Default: 1.")
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(min=0, max=1, help="Updates that the weights of a step lag, simulated. Default: 0.")
    ] = None,
    accounting: Annotated[str, typer.Option(help="default, or published: no transfers, no optimizer.")] = "default",
    hardware: Annotated[str | None, typer.Option(help="With a recipe: hardware such as 8x4090.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture with one row per schedule.")] = None,
    run_really: Annotated[bool, typer.Option("--run", help="Carry the schedules out on the recipe's devices.")] = False,
    repetitions: Annotated[int, typer.Option(min=1, help="With --run: alternating rounds.")] = 5,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="With --run: plain lines instead of a dashboard.")
    ] = False,
) -> None:
    """Compare pipeline schedules on a recipe or a costs file.

    Example: roundpipe bench recipes/quickstart.yaml --run
    """
    if recipe or costs:
        say(f"reading {recipe or costs} ...")
    if run_really:
        from roundpipe_cli.cli.bench_recipe import run_for_real

        for_simulation = {
            **{"--workers": workers, "--microbatches": microbatches, "--steps": steps, "--staleness": staleness},
            **{"--forward-stages": forward_stages, "--backward-stages": backward_stages, "--hardware": hardware},
            **{"--accounting": None if accounting == "default" else accounting, "--svg": svg},
        }
        named = _to_run(recipe, costs, [flag for flag, value in for_simulation.items() if value is not None])
        plain = json_output or no_dashboard
        run_for_real(named, overrides or [], schedule, repetitions, json_output=json_output, plain=plain)
        return
    from roundpipe_cli.cli.bench_options import CaseFlags, asked_cuts, bench_document
    from roundpipe_cli.planning.answers import Answers
    from roundpipe_cli.planning.compare import check_case, run

    flags = CaseFlags(workers, microbatches, accounting, staleness, steps)
    question, request = _question(recipe, overrides or [], costs, hardware, flags=flags)
    check_case(question)
    answers = Answers()
    if request and not (forward_stages or backward_stages) and flags == CaseFlags():
        from roundpipe_cli.cli.bench_recipe import as_planned

        asked = as_planned(request, schedule, answers)
    else:
        from roundpipe_cli.schedule.builders import Options

        asked, bound = [], replace(question, options=Options())  # only roundpipe deals out its stages as a recipe says
        for name, cut in asked_cuts(schedule, forward_stages, backward_stages, question):
            case = bound if name in BOUND_SCHEDULES else question
            asked.append((name, cut or _known_cut(name, case, answers), case))
        if request:
            say("note: with these flags no weights stay on GPUs, as `weight_cache: auto` would have them")
    results = [_known_result(*one, answers) if svg is None else run(*one) for one in asked]
    for damage in answers.damage:
        say(f"notice: {damage}")
    if svg is not None:
        _write_svg(svg, question, request.hardware.description if request else "", results)
    if json_output:
        say_json(bench_document(question, results), indent=None)
    else:
        _print_table(question, results, forward_stages)


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


def _known_cut(name: ScheduleName, case: SimulationCase, answers: Answers) -> StageCut:
    from dataclasses import asdict

    from roundpipe_cli.planning.answers import cut_from
    from roundpipe_cli.planning.choose import choose

    effort: Effort = "full" if case.limits is None else "quick"
    return answers.once(
        ("chosen", name, case, effort),
        lambda: choose(name, case, effort=effort),
        asdict,
        cut_from,
    )


def _to_run(recipe: str | None, costs: Path | None, for_simulation: list[str]) -> str:
    """The recipe that `--run` carries out; refuses a costs file, which is only simulated, and flags of that."""
    if costs is not None:
        raise RefusedError(
            "--run carries out a recipe; a costs file is only simulated",
            found=f"--costs {costs}",
            expected="roundpipe bench RECIPE --run, or --costs without --run",
            hint=f"in a clone of the repository: python scripts/bench_emulated.py --costs {costs}, on emulated devices",
        )
    if recipe is None:
        raise RefusedError("--run needs a recipe", hint="roundpipe bench recipes/quickstart.yaml --run")
    if for_simulation:
        raise RefusedError(
            "--run carries the recipe out as it is; other counts, stages and machines are only simulated",
            found=" ".join(for_simulation),
            expected="--run with --schedule, --repetitions, --json and --no-dashboard",
            hint="change the recipe's keys, for instance: pipeline.devices=[cpu,cpu] gradient_accumulation_steps=16",
        )
    return recipe


def _question(
    recipe: str | None, overrides: list[str], costs_file: Path | None, hardware: str | None, *, flags: CaseFlags
) -> tuple[SimulationCase, PlanRequest | None]:
    """The case to simulate, and the recipe's request that it is from; None with a costs file."""
    from roundpipe_cli.cli.bench_options import case_of_costs

    flags.check()
    if (recipe is None) == (costs_file is None):
        raise RefusedError(
            "bench needs a recipe or a costs file, one of them",
            found="both" if recipe else "neither",
            expected="roundpipe bench RECIPE, or roundpipe bench --costs FILE --workers 8 --microbatches 16",
            hint="roundpipe bench qwen3-8b --hardware 4x3090",
        )
    if costs_file is not None:
        return case_of_costs(costs_file, flags), None
    assert recipe is not None
    from roundpipe_cli.cli.bench_recipe import request_of
    from roundpipe_cli.planning.predict import stage_case

    request = request_of(recipe, overrides, hardware)
    if host_s := request.analytic.host_s(request.settings.num_microbatches):
        say(f"note: Python takes {format_seconds(host_s)} a step to start the operators; no step is faster")
    return flags.applied_to(stage_case(request)), request


def _write_svg(path: Path, question: SimulationCase, machine: str, results: list[Result]) -> None:
    from roundpipe_cli.files import write_named
    from roundpipe_cli.schedule.pictures import svg_picture

    rows = []
    for result in results:
        title = f"{result.schedule.name}: {format_seconds(result.makespan_s)}, bubble {100 * result.parts.ratio:.1f} %"
        rows.append((title, result.timeline))
    basis = f" with the costs of {machine}" if machine else ""
    note = f"simulated{basis}, {question.accounting} accounting, one step"
    write_named(path, svg_picture(rows, heading=_case_words(question), note=note))


def _case_words(question: SimulationCase) -> str:
    workers, microbatches = counted(question.num_workers, "worker"), counted(question.num_microbatches, "microbatch")
    return f"{question.costs.name}: {workers}, {microbatches}"


PARTS = "  fill switch  drain steady"
"""Heading of the column that a narrow terminal has no room for; --json has it."""


def _print_table(question: SimulationCase, results: list[Result], forward_stages: str | None) -> None:
    search = "full search" if question.limits is None else "quick search, as by plan"
    found = search if forward_stages is None else "given stages"
    rows = [["schedule", "stages", "makespan", "step", "bubble", PARTS]]
    for result in results:
        parts, both = result.parts, (result.schedule.forward_stages, result.schedule.backward_stages)
        shares = (parts.fill, parts.switch, parts.drain, parts.steady)
        rows.append(
            [
                f"{result.schedule.name}{_dealing_words(result.dealing)}",
                "+".join(str(sum(last >= first for first, last in stages)) for stages in both),
                format_seconds(result.makespan_s),
                format_seconds(result.step_s),
                f"{100 * parts.ratio:.1f} %",
                " ".join(f"{100 * share:4.1f} %" for share in shares),
            ]
        )
    width = terminal_width()
    title = f"{_case_words(question)}, simulated ({question.accounting} accounting, {found})"
    heading, *lines = aligned(rows, 1, (PARTS,), width)
    for line in (*wrapped([title], width), heading):
        say_data(line)
    best = min(results, key=lambda result: result.step_s) if len(results) > 1 else None
    for line, result in zip(lines, results, strict=True):
        say_data(line, colours={".+": "32"} if result is best else None)
    for num_idle in sorted({_num_idle(result) for result in results} - {0}, reverse=True):
        names = ", ".join(result.schedule.name for result in results if _num_idle(result) == num_idle)
        say(
            f"note: {num_idle} of {counted(question.num_workers, 'worker')} have nothing to do, "
            f"with {len(question.costs.layers)} layers and {question.num_microbatches} microbatches: {names}"
        )


def _dealing_words(dealing: Options) -> str:
    if dealing.earliest_free:
        return ", earliest free"
    return ", last stages shared" if dealing.shared_stages else ""


def _num_idle(result: Result) -> int:
    """Workers that get no layer of the model."""
    from roundpipe_cli.schedule.actions import Kind

    schedule = result.schedule
    held = {
        action.worker
        for row in schedule.actions
        for action in row
        for stages in [schedule.forward_stages if action.kind is Kind.FORWARD else schedule.backward_stages]
        if stages[action.stage][1] >= stages[action.stage][0]
    }
    return schedule.num_workers - len(held)
