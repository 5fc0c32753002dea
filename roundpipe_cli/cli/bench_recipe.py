"""`roundpipe bench RECIPE`: a recipe's schedules, simulated, and with `--run` carried out by the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe_cli.choices import BOUND_SCHEDULES
from roundpipe_cli.cli.bench_options import entry, named_schedules
from roundpipe_cli.cli.output import build_counts, quiet_libraries, say, say_data, say_json
from roundpipe_cli.events import Event, StepFinished
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.predict import cards_worth_using
from roundpipe_cli.planning.question import PlanRequest, ask
from roundpipe_cli.planning.run_plan import contender
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.units import aligned, format_bytes, format_seconds
from roundpipe_cli.watchdog import watching

if TYPE_CHECKING:
    from roundpipe_cli.train.bench_run import Comparison, Measured


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
    from roundpipe_cli.cli.finetune import ask_on_cards_worth_using
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.train.preflight import check_sources, fetch_model, found_config
    from roundpipe_cli.train.signals import Start

    loaded = load_recipe(recipe, overrides)
    for text in loaded.notices:
        say(f"note: {text}")
    names = named_schedules(schedules, loaded.recipe.pipeline.num_chunks)
    from roundpipe_cli.train.bench_run import compare_for_real

    printer = LinePrinter(1)
    source = check_sources(loaded, Start(), printer)
    quiet_libraries()
    source = fetch_model(loaded, Start(), printer, source)
    asked = ask_on_cards_worth_using(loaded, printer, found_config(source))
    if asked is not None and asked.given is not None:
        loaded = asked.given

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
        rows = [{**entry(item.predicted), **_measured(item)} for item in comparison.schedules]
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
    best = most_tokens_per_s(comparison)
    others = [item for item in comparison.schedules if item is not best]
    if others:
        second = max(others, key=lambda item: item.tokens_per_s)
        gain = 100 * (best.tokens_per_s / second.tokens_per_s - 1)
        lines.append(f"{best.name} is the fastest here, {gain:.1f} % before {second.name}; all losses agree.")
    kept = (f"  {key}: {value}" for key, value in keep_lines(comparison)["pipeline"].items())
    for line in [*lines, "To keep it:", "", "pipeline:", *kept]:
        say_data(line)


def request_of(recipe: str, overrides: list[str], hardware: str | None) -> PlanRequest:
    """The question that `plan` answers for this recipe, for the devices that it uses.

    Raises:
        RefusedError: the recipe, its model or the hardware.
    """
    loaded = load_recipe(recipe, overrides)
    with watching(loaded.recipe.watchdog_s):
        question = ask(loaded, hardware, build=build_counts)
        used = cards_worth_using(question, Answers())
    if used.num_workers < question.num_workers:
        say(f"note: as in `plan`, on {used.num_workers} of {question.num_workers} GPUs")
    return used


def as_planned(
    request: PlanRequest, schedules: list[str] | None, answers: Answers
) -> list[tuple[str, StageCut, SimulationCase]]:
    """Each schedule with its stages and the case to simulate; all schedules where none is named.

    Raises:
        RefusedError: a schedule, or the recipe with it.
    """
    recipe, found = request.loaded.recipe, list[tuple[str, StageCut, SimulationCase]]()
    with watching(recipe.watchdog_s):
        for name in named_schedules(schedules, recipe.pipeline.num_chunks):
            cut, case, reasons = contender(request, name, answers)
            found.append((name, cut, case))
            if reasons:
                say(f"note: {name} does not fit: {reasons[0]}")
    return found
