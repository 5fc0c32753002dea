"""`roundpipe plan`: whether a recipe fits, how it is cut, how long it takes. No GPU, download or torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe_cli.costs.cost import LayerCost, StageRange
    from roundpipe_cli.costs.memory import Need
    from roundpipe_cli.planning.predict import Plan
    from roundpipe_cli.planning.solve import Solution


def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="key=value in place of the recipe's, such as lora.r=32."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Another machine: 8x4090,host_memory_gib=256 or 4x3090+2x4060ti."),
    ] = None,
    solve: Annotated[bool, typer.Option("--solve", help="Also say what would fit, and the cheapest changes.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="A row for each combination of values: hardware=1x4090,2x4090 lora.r=8,16."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show stages, memory by part, links and assumptions.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of one step to this file.")] = None,
) -> None:
    """Say whether a recipe fits, how its layers are cut, and how long it takes. Needs no GPU and no download.

    Example: roundpipe plan qwen3-8b --hardware 2x3090,host_memory_gib=64 --solve
    """
    from roundpipe_cli.cli.output import say, say_data

    say(f"planning {recipe} ...")
    from roundpipe_cli.cli.built_model import build_counts
    from roundpipe_cli.cli.colour import VERDICTS
    from roundpipe_cli.cli.plan_compare import show_comparison
    from roundpipe_cli.cli.watch_demo import write_plan_picture
    from roundpipe_cli.cli.wrap import terminal_width, wrapped
    from roundpipe_cli.planning.answers import Answers
    from roundpipe_cli.planning.predict import make_plan, solve_recipe
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.watchdog import watching

    if compare:
        _refuse_beside_compare(solve, svg)
        show_comparison(recipe, overrides or (), hardware, as_json=json_)
        return
    loaded = load_recipe(recipe, overrides or ())
    for notice in loaded.notices:
        say(f"notice: {notice}")
    answers = Answers()
    with watching(loaded.recipe.watchdog_s):
        answer = make_plan(loaded, hardware, build_counts, answers)
        solution = solve_recipe(answer) if solve else None
    for damage in answers.damage:
        say(f"notice: {damage}")
    if svg is not None:
        write_plan_picture(answer, svg)
    if json_:
        import json

        say_data(json.dumps(plan_document(answer, solution), indent=1))
        return
    for line in wrapped(plan_text(answer, solution, details=verbose), terminal_width()):
        say_data(line, colours=VERDICTS)


def _refuse_beside_compare(solve: bool, svg: Path | None) -> None:
    from roundpipe_cli.errors import RefusedError

    if solve or svg is not None:
        other = "--solve" if solve else "--svg"
        hint = f"leave --compare out to use {other} on one of its combinations"
        raise RefusedError(f"--compare makes several plans, and {other} is for one", hint=hint)


def plan_document(answer: Plan, solution: Solution | None) -> dict[str, Any]:
    """The document that `--json` prints. Seconds and bytes; layers in the form of a costs file."""
    verdict = answer.verdict
    document: dict[str, Any] = {
        "fits": verdict.fits,
        "reasons": list(verdict.reasons),
        "workers": answer.question.num_workers,
        "forward_stages": [list(stage) for stage in answer.forward_stages],
        "backward_stages": [list(stage) for stage in answer.backward_stages],
        "layers": [
            {
                "name": layer.name,
                "forward_s": layer.forward_s,
                "backward_s": layer.backward_s,
                "recompute": layer.recompute,
                "param_bytes": layer.param_bytes,
                "boundary_bytes": layer.boundary_bytes,
                "grad_bytes": layer.grad_bytes,
                "optimizer_s": layer.optimizer_s,
                "activation_bytes": layer.activation_bytes,
                "recompute_skippable_s": layer.recompute_skippable_s,
            }
            for layer in answer.layers
        ],
        "predicted": {
            "step_s": answer.step_s,
            "tokens_per_s": answer.tokens_per_s,
            "bubble_ratio": answer.bubble_ratio,
            "device_peak_bytes": verdict.device.total_bytes,
            "host_bytes": verdict.host.total_bytes,
            "loading_host_bytes": verdict.loading.total_bytes,
            "disk_bytes": verdict.disk.total_bytes,
            "upload_bytes_per_step": answer.links.up,
            "step_s_range": list(answer.band.around(answer.step_s)),
            "tokens_per_s_range": list(answer.band.around(answer.tokens_per_s)),
            "range_rests_on": answer.band.why,
        },
        "assumptions": list(answer.assumptions),
    }
    if not verdict.fits:
        document["shipped_recipe"] = _fitting_name(answer)
    if solution is not None:
        document["solve"] = {
            "max_seq_length": solution.max_seq_length,
            "micro_batch_size": solution.micro_batch_size,
            "changes": [{"what": change.what, "overrides": list(change.overrides)} for change in solution.changes],
        }
    return document


def _fitting_name(answer: Plan) -> str | None:
    """The shipped recipe that fits where this one does not, as a user types it."""
    from roundpipe_cli.planning.solve import fitting_recipe

    fitting = fitting_recipe(answer.question)
    return fitting.command_name if fitting is not None else None


def plan_text(answer: Plan, solution: Solution | None, *, details: bool = True) -> list[str]:
    """The plan as text, the verdict first."""
    from roundpipe_cli.cli.plan_verdict import verdict_lines
    from roundpipe_cli.planning.question import who_does_what

    lines = [*verdict_lines(answer), ""]
    if solution is not None:
        lines += [*_solution_lines(answer, solution), ""]
    if not details:
        return [*lines, "`-v` shows stages, memory by part, links, and what this rests on"]
    lines += [*_stage_lines(answer), ""]
    unequal = who_does_what(answer.question, lambda: answer.timeline)
    lines += [*unequal, ""] if unequal else []
    lines += [*_memory_lines(answer), ""]
    lines += [*_link_lines(answer), ""]
    if answer.explanation:
        lines += ["why this cut", *(f"  {line}" for line in answer.explanation), ""]
    return [*lines, "what this rests on", *(f"  {line}" for line in answer.assumptions)]


def _solution_lines(answer: Plan, solution: Solution) -> list[str]:
    limit = answer.question.architecture.max_position_embeddings
    bound = " (the model's own limit)" if limit is not None and solution.max_seq_length == limit else ""
    key, size, recipe = "micro_batch_size", solution.micro_batch_size, answer.question.loaded.recipe
    if recipe.token_budget is not None:
        key, size = "micro_batch_tokens", size and size * recipe.tokens_of_full_row
    lines = [
        "what would fit",
        f"  longest max_seq_length, all else equal: {_or_none(solution.max_seq_length)}{bound}",
        f"  largest {key}, all else equal: {_or_none(size)}",
    ]
    if solution.changes:
        lines.append("cheapest changes that make it fit")
        lines += [f"  {number}. {change.what}" for number, change in enumerate(solution.changes, 1)]
    return lines


def _or_none(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _stage_lines(answer: Plan) -> list[str]:
    from roundpipe_cli.units import counted, format_bytes, format_seconds

    layers = answer.question.analytic.costs.layers
    lines = [
        f"{len(answer.forward_stages) or 'no'} forward and {counted(len(answer.backward_stages), 'backward stage')}, "
        f"{counted(answer.microbatches_per_round, 'microbatch')} a round; bytes and time of one stage, "
        "time of one microbatch"
    ]
    for direction, stages in (("forward", answer.forward_stages), ("backward", answer.backward_stages)):
        for start, end in _alike(layers, stages):
            first, last = stages[start]
            inside = layers[first : last + 1]
            seconds = sum(layer.forward_s for layer in inside)
            if direction == "backward":
                seconds = sum((2 if layer.recompute else 1) * layer.forward_s + layer.backward_s for layer in inside)
            covered = layers[min(first, stages[end - 1][0]) : max(last, stages[end - 1][1]) + 1]
            which = f"{start}" if end == start + 1 else f"{start}-{end - 1}"
            names = f"{covered[0].name} .. {covered[-1].name}" if len(covered) > 1 else covered[0].name
            each = f"{len(inside)} layer{'' if len(inside) == 1 else 's'}{' each' if end > start + 1 else ''}"
            weights = format_bytes(sum(layer.param_bytes for layer in inside))
            lines.append(
                f"  {direction:8} {which:>7}  {names:22} {each:>15} {weights:>10} {format_seconds(seconds):>9}"
            )
    return lines


def _alike(layers: Sequence[LayerCost], stages: Sequence[StageRange]) -> list[tuple[int, int]]:
    """Runs `start:end` of stages that hold equally many layers of equal cost; empty stages are left out."""
    runs: list[tuple[int, int]] = []
    before: list[tuple[float, ...]] = []
    for index, (first, last) in enumerate(stages):
        costs = [(layer.forward_s, layer.backward_s, layer.param_bytes) for layer in layers[first : last + 1]]
        if not costs or last < first:
            before = []
        elif costs == before:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
            before = list(costs)
    return runs


def _memory_lines(answer: Plan) -> list[str]:
    from roundpipe_cli.units import format_bytes

    hardware, verdict = answer.question.hardware, answer.verdict
    smallest = min(hardware.devices, key=lambda device: device.memory_bytes)
    has = f" of {format_bytes(smallest.memory_bytes)}" if not smallest.is_cpu else ""
    host = f" of {format_bytes(hardware.host_memory_bytes)}"
    disk = f" of {format_bytes(hardware.disk_free_bytes)} free" if hardware.disk_free_bytes is not None else ""
    lines = [f"memory of one worker ({smallest.name}): {format_bytes(verdict.device.total_bytes)}{has}"]
    lines += _part_lines(verdict.device)
    lines += [f"host memory: {format_bytes(verdict.host.total_bytes)}{host}", *_part_lines(verdict.host)]
    if verdict.loading.total_bytes > verdict.host.total_bytes:
        lines += [f"host memory while loading: {format_bytes(verdict.loading.total_bytes)}{host}"]
        lines += _part_lines(verdict.loading)
    lines += [f"disk: {format_bytes(verdict.disk.total_bytes)}{disk}", *_part_lines(verdict.disk)]
    return lines


def _part_lines(need: Need) -> list[str]:
    from roundpipe_cli.units import format_bytes

    parts = sorted((part for part in need.parts if part.num_bytes), key=lambda part: -part.num_bytes)
    return [f"  {format_bytes(part.num_bytes):>10}  {part.name}" for part in parts]


def _link_lines(answer: Plan) -> list[str]:
    from roundpipe_cli.units import format_bytes, format_seconds

    links = answer.links
    lines = [
        "over the links in one step, all workers together",
        f"  {format_bytes(links.weights_up):>10}  weights to the workers",
        f"  {format_bytes(links.boundaries_up):>10}  hidden states and their gradients to the workers",
        f"  {format_bytes(links.boundaries_down):>10}  hidden states and their gradients back",
        f"  {format_bytes(links.gradients_down):>10}  weight gradients back",
    ]
    if answer.host_s:
        share = answer.host_s / answer.step_s
        lines.append(
            f"of the step, {format_seconds(answer.host_s)} ({100 * share:.0f} %) is Python starting the operators"
        )
    return lines
