"""The `--run` half of `roundpipe bench`: schedules carried out by the engine, predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundpipe_cli.train.bench_run import Comparison, Measured


def run_for_real(
    recipe: str,
    overrides: list[str],
    schedules: list[str] | None,
    repetitions: int,
    json_output: bool,
    *,
    plain: bool = False,
) -> None:
    """Run the schedules of a recipe on its devices and print what was measured."""
    from roundpipe_cli.choices import CHUNK_SCHEDULES, SCHEDULES
    from roundpipe_cli.cli.bench_results import entry
    from roundpipe_cli.cli.display import Display
    from roundpipe_cli.cli.finetune import ask_on_cards_worth_using
    from roundpipe_cli.cli.libraries import quiet_libraries
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.cli.output import say
    from roundpipe_cli.events import Event, StepFinished
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.schedule.builders import schedule_name
    from roundpipe_cli.train.finetune import check_sources, fetch_model, found_config
    from roundpipe_cli.train.signals import Start

    loaded = load_recipe(recipe, overrides)
    for text in loaded.notices:
        say(f"note: {text}")
    known = SCHEDULES if loaded.recipe.pipeline.num_chunks == 1 else CHUNK_SCHEDULES
    names = list(dict.fromkeys(schedule_name(name) for name in schedules or known))
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
        import json

        import typer

        rows = [{**entry(item.predicted), **_measured(item)} for item in comparison.schedules]
        document = {
            "workers": len(comparison.devices),
            "microbatches": comparison.num_microbatches,
            "results": rows,
            "keep": keep_lines(comparison),
        }
        typer.echo(json.dumps(document))
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
    from roundpipe_cli.choices import BOUND_SCHEDULES

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
    from rich.console import Console
    from rich.table import Table

    from roundpipe_cli.units import format_bytes, format_seconds

    table = Table(
        title=f"{', '.join(comparison.devices)}; {comparison.num_microbatches} microbatches; "
        f"medians of {repetitions} alternating rounds",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("schedule", no_wrap=True)
    for heading in ("tokens/s", "step", "predicted", "off", "bubble", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in comparison.schedules:
        predicted_s = item.predicted.makespan_s
        table.add_row(
            item.name,
            f"{item.tokens_per_s:.0f}",
            format_seconds(item.makespan_s),
            format_seconds(predicted_s),
            f"{100 * (item.makespan_s / predicted_s - 1):+.0f} %",
            f"{100 * item.bubble_ratio:.1f} %",
            format_bytes(item.device_peak_bytes) if item.device_peak_bytes else "-",
        )
    console = Console()
    console.print(table)

    best = most_tokens_per_s(comparison)
    others = [item for item in comparison.schedules if item is not best]
    if others:
        second = max(others, key=lambda item: item.tokens_per_s)
        gain = 100 * (best.tokens_per_s / second.tokens_per_s - 1)
        console.print(f"{best.name} is the fastest here, {gain:.1f} % before {second.name}; all losses agree.")
    lines = keep_lines(comparison)["pipeline"]
    console.print("To keep it:\n\npipeline:", soft_wrap=True)
    for key, value in lines.items():
        console.print(f"  {key}: {value}", soft_wrap=True, highlight=False, markup=False)
