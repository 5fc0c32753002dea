"""The work of `roundpipe bench`: cases from flags, a costs file or a recipe; their simulation; `--run`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe_cli.choices import BOUND_SCHEDULES, CHUNK_SCHEDULES, SCHEDULE_KINDS, SCHEDULES, ScheduleName
from roundpipe_cli.cli.output import quiet_libraries, say, say_data, say_json, terminal_width, wrapped
from roundpipe_cli.cli.parameter_counts import build_counts
from roundpipe_cli.costs.cost import load_costs
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, StepFinished
from roundpipe_cli.files import write_named
from roundpipe_cli.heap import keep_heap
from roundpipe_cli.planning.answers import Answers, answered
from roundpipe_cli.planning.choose import Effort, choose
from roundpipe_cli.planning.compare import (
    BUBBLE_PARTS,
    Result,
    SimulationCase,
    StageCut,
    check_case,
    row_of,
    run,
    schedule_figures,
)
from roundpipe_cli.planning.predict import best_plan, cards_worth_using, stage_case
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.run_plan import contender
from roundpipe_cli.planning.solve import remedies
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import Options, schedule_name
from roundpipe_cli.schedule.pictures import svg_picture
from roundpipe_cli.units import aligned, counted, format_bytes, format_seconds
from roundpipe_cli.watchdog import watching

if TYPE_CHECKING:
    from roundpipe_cli.train.bench_run import Comparison, Measured


# The flags that say what is simulated: their checks and effect on the case.

MAX_WORKERS, MAX_MICROBATCHES, MAX_STEPS = 256, 20_000, 1000
"""2,000 microbatches of five layers on four workers, with all schedules, take 5 s of processor time."""


@dataclass(frozen=True, slots=True)
class CaseFlags:
    """The flags that apply to every schedule; None leaves the value to the recipe or the default."""

    workers: int | None = None
    microbatches: int | None = None
    staleness: int | None = None
    steps: int | None = None

    def check(self) -> None:
        """Refuse a case that would be simulated for hours."""
        for flag, value, most in (
            ("--workers", self.workers, MAX_WORKERS),
            ("--microbatches", self.microbatches, MAX_MICROBATCHES),
            ("--steps", self.steps, MAX_STEPS),
        ):
            if value is not None and value > most:
                raise RefusedError(f"{flag} is too large to simulate", found=str(value), expected=f"at most {most}")

    def applied_to(self, case: SimulationCase) -> SimulationCase:
        """The case with the flags' values in place of its own."""
        if self.staleness is not None and self.staleness != case.staleness:
            case = replace(case, staleness=1 if self.staleness else 0, num_steps=1)
        return replace(
            case,
            num_workers=case.num_workers if self.workers is None else self.workers,
            num_microbatches=case.num_microbatches if self.microbatches is None else self.microbatches,
            num_steps=case.num_steps if self.steps is None else self.steps,
        )


def case_of_costs(path: Path, flags: CaseFlags) -> SimulationCase:
    """The case of a costs file, which has no counts of workers and microbatches.

    Raises:
        RefusedError: the file, or a count that no flag gives.
    """
    workers, microbatches = flags.workers, flags.microbatches
    if workers is None or microbatches is None:
        given = (("--workers", workers), ("--microbatches", microbatches))
        missing = " and ".join(flag for flag, value in given if value is None)
        hint = "--workers 8 --microbatches 16"
        raise RefusedError(f"{missing} missing", expected="both, beside --costs", hint=hint)
    return flags.applied_to(SimulationCase(load_costs(path), workers, microbatches))


def named_schedules(given: Sequence[str] | None, sequence_chunks: int) -> list[ScheduleName]:
    """The schedules that are named, else all that suit so many chunks."""
    known = SCHEDULES if sequence_chunks == 1 else CHUNK_SCHEDULES
    return list(dict.fromkeys(schedule_name(name) for name in given or known))


# The simulation.


def simulate(
    recipe: str | None,
    overrides: list[str],
    costs: Path | None,
    hardware: str | None,
    *,
    flags: CaseFlags,
    schedules: list[str] | None,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Print the figures of the schedules, and draw them."""
    keep_heap()
    question, request = _question(recipe, overrides, costs, hardware, flags=flags)
    check_case(question)
    answers, unfit = (request.answers if request else None) or Answers(), set[str]()
    if request and flags == CaseFlags():
        asked, unfit = as_planned(request, schedules)
    else:
        asked, bound = [], replace(question, options=Options())  # only roundpipe deals out its stages as a recipe says
        for name in named_schedules(schedules, question.sequence_chunks):
            case = bound if name in BOUND_SCHEDULES else question
            asked.append((name, _known_cut(name, case, answers), case))
        if request:
            say("note: with these flags no weights stay on GPUs, as `weight_cache: auto` would have them")
    results = [run(*one) for one in asked] if svg is not None else []
    rows = [row_of(result) for result in results] or [_known_row(*one, answers) for one in asked]
    for damage in answers.damage:
        say(f"notice: {damage}")
    if svg is not None:
        _write_svg(svg, question, request.hardware.description if request else "", results)
    seconds = {row["figures"]["schedule"]: row["figures"]["step_s"] for row in rows}
    sentence = fastest_words({name: step_s for name, step_s in seconds.items() if name not in unfit})
    plan = best_plan(request)[1] if request else None
    remedy = [change.what for change in remedies(plan)[:1]] if plan else []
    if as_json:
        document = bench_document(question, (row["figures"] for row in rows))
        say_json({**document, "summary": sentence, "remedy": next(iter(remedy), None)}, indent=None)
        return
    _print_table(question, rows)
    for line in [
        *(f"remedy, as by `plan`: {what}" for what in remedy),
        *([f"{sentence} (simulated)."] if sentence else []),
    ]:
        for part in wrapped([line], terminal_width()):
            say_data(part)


def _question(
    recipe: str | None, overrides: list[str], costs_file: Path | None, hardware: str | None, *, flags: CaseFlags
) -> tuple[SimulationCase, PlanRequest | None]:
    """The case to simulate, and the recipe's request that it is from; None with a costs file."""
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
    request = request_of(recipe, overrides, hardware)
    return flags.applied_to(stage_case(request)), request


def request_of(recipe: str, overrides: list[str], hardware: str | None) -> PlanRequest:
    """The question that `plan` answers for this recipe, for the devices that it uses.

    Raises:
        RefusedError: the recipe, its model or the hardware.
    """
    from roundpipe_cli.train.run_length import with_estimated_length

    loaded = load_recipe(recipe, overrides)
    with watching(loaded.recipe.watchdog_s):
        question = ask(with_estimated_length(loaded), hardware, build=build_counts, answers=Answers())
        used = cards_worth_using(question)
    if note := used.given.length_note:
        say(f"note: {note}")
    if (machines := used.hardware.machines) > 1:
        say(f"note: a step on one of {machines} machines, without their exchange of gradients")
    if used.loaded.recipe.objective_kind.num_passes:
        say("note: without the base model's forward, which answers are compared with")
    if used.num_workers < question.num_workers:
        say(f"note: as in `plan`, on {used.num_workers} of {question.num_workers} GPUs")
    return used


def fastest_words(seconds: Mapping[str, float]) -> str:
    """`RoundPipe is 1.24 times as fast as interleaved 1F1B`, the next fastest, for a paper; empty for one schedule.

    Args:
        seconds: schedule -> of a step.
    """
    if len(seconds) < 2:
        return ""
    best, second = sorted(seconds, key=seconds.__getitem__)[:2]
    ratio = seconds[second] / seconds[best]
    return f"{SCHEDULE_KINDS[best].label} is {ratio:.2f} times as fast as {SCHEDULE_KINDS[second].label}"


def as_planned(
    request: PlanRequest, schedules: list[str] | None
) -> tuple[list[tuple[str, StageCut, SimulationCase]], set[str]]:
    """Each schedule with its stages and the case to simulate, all schedules where none is named; those that do not fit.

    Raises:
        RefusedError: a schedule, or the recipe with it.
    """
    recipe, found, unfit = request.loaded.recipe, list[tuple[str, StageCut, SimulationCase]](), set[str]()
    with watching(recipe.watchdog_s):
        for name in named_schedules(schedules, recipe.pipeline.num_chunks):
            cut, case, reasons = contender(request, name)
            found.append((name, cut, case))
            if reasons:
                unfit.add(name)
                say(f"note: {name} does not fit: {reasons[0]}")
    return found, unfit


def _known_row(name: str, cut: StageCut, case: SimulationCase, answers: Answers) -> dict[str, Any]:
    return answered(answers, ("simulated", name, cut, case), lambda: row_of(run(name, cut, case)))


def _known_cut(name: ScheduleName, case: SimulationCase, answers: Answers) -> StageCut:
    effort: Effort = "full" if case.limits is None else "quick"
    return answered(answers, ("chosen", name, case, effort), lambda: choose(name, case, effort=effort), StageCut)


def _write_svg(path: Path, question: SimulationCase, machine: str, results: list[Result]) -> None:
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


def _print_table(question: SimulationCase, found: list[dict[str, Any]]) -> None:
    basis = "full search" if question.limits is None else "quick search, as by plan"
    rows = [["schedule", "stages", "makespan", "step", "bubble", PARTS]]
    for row in found:
        figures = row["figures"]
        both = (figures["forward_stages"], figures["backward_stages"])
        rows.append(
            [
                f"{figures['schedule']}{row['dealing']}",
                "+".join(str(sum(last >= first for first, last in stages)) for stages in both),
                format_seconds(figures["makespan_s"]),
                format_seconds(figures["step_s"]),
                f"{100 * figures['bubble_ratio']:.1f} %",
                " ".join(f"{100 * figures[part]:4.1f} %" for part in BUBBLE_PARTS),
            ]
        )
    width = terminal_width()
    title = f"{_case_words(question)}, simulated ({question.accounting} accounting, {basis})"
    heading, *lines = aligned(rows, 1, (PARTS,), width)
    for line in (*wrapped([title], width), heading):
        say_data(line)
    best = min(found, key=lambda row: row["figures"]["step_s"]) if len(found) > 1 else None
    for line, row in zip(lines, found, strict=True):
        say_data(line, colours={".+": "32"} if row is best else None)
    if PARTS not in heading:
        say("note: the terminal is too narrow for the parts of a bubble; --json has them")
    for num_idle in sorted({row["num_idle"] for row in found} - {0}, reverse=True):
        names = ", ".join(row["figures"]["schedule"] for row in found if row["num_idle"] == num_idle)
        say(
            f"note: {num_idle} of {counted(question.num_workers, 'worker')} have nothing to do, "
            f"with {len(question.costs.layers)} layers and {question.num_microbatches} microbatches: {names}"
        )


def bench_document(question: SimulationCase, figures: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The document that `--json` prints, with what `schedule_figures` made of each schedule."""
    counts = {"workers": question.num_workers, "microbatches": question.num_microbatches}
    return {**counts, "results": list(figures)}


# The `--run` half of `roundpipe bench`: schedules carried out by the engine, predicted against measured.


def run_for_real(
    recipe: str,
    overrides: list[str],
    schedules: list[str] | None,
    repetitions: int,
    *,
    json_output: bool,
    plain: bool = False,
) -> None:
    """Run the schedules of a recipe on its devices and print what was measured."""
    from roundpipe_cli.cli.display import Display
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.cli.training import ask_on_cards_worth_using, with_row_length
    from roundpipe_cli.train.preflight import check_sources, fetch_model, found_config
    from roundpipe_cli.train.signals import Start

    loaded = load_recipe(recipe, overrides)
    for text in loaded.notices:
        say(f"note: {text}")
    names = named_schedules(schedules, loaded.recipe.pipeline.num_chunks)
    from roundpipe_cli.train.bench_run import compare_for_real

    printer = LinePrinter(1)
    source = check_sources(loaded, Start(), printer)
    loaded = with_row_length(loaded, source, offline=False, tell=printer)
    quiet_libraries()
    source = fetch_model(loaded, Start(), printer, source)
    asked = ask_on_cards_worth_using(loaded, printer, found_config(source))
    if asked is not None:
        loaded, decided = asked.given, asked.loaded.recipe
        names = named_schedules(schedules, decided.pipeline.num_chunks)

    def show(event: Event) -> None:
        if not isinstance(event, StepFinished):  # stdout is for the comparison
            printer(event)

    with Display(show, dashboard=not plain) as display:
        comparison = compare_for_real(
            loaded,
            names,
            repetitions=repetitions,
            tell=display,
            say=display.say,
            live=display.is_dashboard,
            asked=asked,
        )
    if json_output:
        rows = [{**schedule_figures(item.predicted), **_measured(item)} for item in comparison.schedules]
        counts = {"workers": len(comparison.devices), "microbatches": comparison.num_microbatches}
        say_json({**counts, "results": rows, "keep": keep_lines(comparison)}, indent=None)
    else:
        _print(comparison, repetitions)


def _measured(item: Measured) -> dict[str, Any]:
    return {
        "measured_makespan_s": item.makespan_s,
        "measured_bubble_ratio": item.bubble_ratio,
        "tokens_per_s": item.tokens_per_s,
        "device_peak_bytes": item.device_peak_bytes,
        "loss": item.loss,
    }


def most_tokens_per_s(comparison: Comparison) -> Measured:
    """The schedule with the most tokens per second."""
    return max(comparison.schedules, key=lambda item: item.tokens_per_s)


def keep_lines(comparison: Comparison) -> dict[str, Any]:
    """Recipe keys that select the fastest schedule as it was measured."""
    best = most_tokens_per_s(comparison).predicted.schedule
    if not best.forward_stages:  # a run chooses whole microbatches on each worker where it may
        return {"pipeline": {"schedule": best.name}}
    keep: dict[str, Any] = {"schedule": best.name, "forward_stages": [list(stage) for stage in best.forward_stages]}
    if best.name not in BOUND_SCHEDULES:
        keep["backward_stages"] = [list(stage) for stage in best.backward_stages]
        if most_tokens_per_s(comparison).predicted.dealing.earliest_free:
            keep["dispatch"] = "earliest_free"
    return {"pipeline": keep}


def _print(comparison: Comparison, repetitions: int) -> None:
    rows = [["schedule", "tokens/s", "step", "predicted", "off", "bubble", "memory"]]
    for item in comparison.schedules:
        predicted_s = item.predicted.makespan_s
        rows.append(
            [
                item.name,
                f"{item.tokens_per_s:.0f}",
                format_seconds(item.makespan_s),
                format_seconds(predicted_s),
                f"{100 * (item.makespan_s / predicted_s - 1):+.0f} %",
                f"{100 * item.bubble_ratio:.1f} %",
                format_bytes(item.device_peak_bytes) if item.device_peak_bytes else "-",
            ]
        )
    basis = f"{', '.join(comparison.devices)}; {comparison.num_microbatches} microbatches"
    lines = [f"{basis}; medians of {repetitions} alternating rounds", *aligned(rows, 1)]
    if sentence := fastest_words(
        {item.predicted.schedule.name: 1 / item.tokens_per_s for item in comparison.schedules}
    ):
        lines.append(f"{sentence} here; all losses agree.")
    kept = (f"  {key}: {value}" for key, value in keep_lines(comparison)["pipeline"].items())
    for line in [*lines, "To keep it:", "", "pipeline:", *kept]:
        say_data(line)
