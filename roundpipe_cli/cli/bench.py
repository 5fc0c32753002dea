"""`roundpipe bench`: pipeline schedules compared, by simulation or carried out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundpipe_cli.cli.output import say
from roundpipe_cli.errors import RefusedError


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
    steps: Annotated[
        int | None, typer.Option(help="Chained optimizer steps: 1, or an even number. Default: 1.")
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(min=0, max=1, help="Updates that the weights of a step lag, simulated. Default: 0.")
    ] = None,
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
    from roundpipe_cli.cli.bench_schedules import CaseFlags, run_for_real, simulate

    if run_really:
        for_simulation = {
            **{"--workers": workers, "--microbatches": microbatches, "--steps": steps, "--staleness": staleness},
            **{"--hardware": hardware, "--svg": svg},
        }
        named = _to_run(recipe, costs, [flag for flag, value in for_simulation.items() if value is not None])
        plain = json_output or no_dashboard
        run_for_real(named, overrides or [], schedule, repetitions, json_output=json_output, plain=plain)
        return
    simulate(
        recipe,
        overrides or [],
        costs,
        hardware,
        flags=CaseFlags(workers, microbatches, staleness, steps),
        schedules=schedule,
        svg=svg,
        as_json=json_output,
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
