"""`roundpipe plan`: whether a recipe fits, how it is cut, how long it takes. No GPU, download or torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli.cli.output import VERDICTS, say, say_data, say_json, terminal_width, wrapped
from roundpipe_cli.cli.parameter_counts import build_counts
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.heap import keep_heap
from roundpipe_cli.units import aligned, counted, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from roundpipe_cli.costs.cost import LayerCost, StageRange
    from roundpipe_cli.planning.predict import Plan
    from roundpipe_cli.planning.solve import Change, Solution
    from roundpipe_cli.planning.what_if import Combination
    from roundpipe_cli.recipe.load import LoadedRecipe
    from roundpipe_cli.train.run_length import Forecast, RunLength


# The verdict of a plan: what `roundpipe plan` prints first, within a screen of 24 rows and 80 columns.

NO_GPU_HINT = "No GPU here: planned for the CPU. Other machines: --hardware 1x4090, 2x3090,host_memory_gib=64, 1xh100"


def verdict_lines(answer: Plan, found: Sequence[Change] | None = None, length: RunLength | None = None) -> list[str]:
    """The word and its reason, the model, the machine; then a figure a line, and what to do where it is not FITS.

    Args:
        found: the remedies; None: nobody looked for them.
        length: of the run; None: found here.
    """
    from roundpipe_cli.choices import PACKED_FORMATS
    from roundpipe_cli.costs.machine import NOT_USED, SLOW_NOTE
    from roundpipe_cli.planning.chunk_count import CHUNKS_KEY
    from roundpipe_cli.planning.what_if import summary_of
    from roundpipe_cli.recipe.schema import LENGTH_KEY
    from roundpipe_cli.train.run_length import forecast, left_to_resume, run_length

    question, settings = answer.question, answer.question.settings
    summary = summary_of(answer)
    count = f"{format_count(question.architecture.parameters)} parameters"
    if question.architecture.is_guess:
        count = f"a guess: {count}"
    packed = f" in {PACKED_FORMATS[settings.packed_as].label}" if settings.packed_as else ""
    what = f"{question.loaded.recipe.model} ({count}), {settings.method}{packed}, {settings.dtype}"
    lines = [f"{summary.word}: {what}", *(f"  {reason}" for reason in summary.reasons)]
    lines.append(f"  on {question.hardware.description}: {question.machine_source}")
    lines += [f"  {note}" for note in question.architecture.notes]
    lines += [f"  {choice}" for choice in question.choices if choice.startswith((CHUNKS_KEY, LENGTH_KEY))]
    lines += [f"  warning: {answer.warning}"] if answer.warning else []
    bubble = f"{question.tokens_per_step:,} tokens, bubble {100 * answer.bubble_ratio:.1f} %"
    if summary.word == "DOES NOT FIT":
        bubble += ", if it did fit"
    a_step = " to ".join(format_seconds(seconds) for seconds in answer.band.around(answer.step_s))
    least, most = answer.tokens_per_s_range
    length = length or run_length(answer)
    time, rest = forecast(answer, length), []
    if (found_rest := left_to_resume(answer, length)) is not None:
        folder, left = found_rest
        rest = [f"  --resume        {format_seconds(left * time.step_s)} for {counted(left, 'step')} from {folder}"]
    return [
        *lines,
        *_memory(answer),
        f"  a step          {format_seconds(answer.step_s)} ({a_step}): {bubble}",
        *([f"  of which        {answer.parts}"] if question.gpus else []),
        f"  tokens/s        {answer.tokens_per_s:,.0f} ({least:,.0f} to {most:,.0f}): {answer.band.why}",
        f"  time to finish  {time.text}",
        *rest,
        *(line for line in [_launches(answer)] if line),
        *(note for note in question.hardware.notes if note.startswith((SLOW_NOTE, NOT_USED))),
        *_cost_lines(answer, length, time),
        *([] if found is None or summary.word == "FITS" else _remedy_lines(answer, found)),
        *(f"  faster          {change.what}" for change in (found or ()) if summary.word == "FITS"),
        *([NO_GPU_HINT] if question.is_for_lack_of_gpus else []),
    ]


def _cost_lines(answer: Plan, length: RunLength, time: Forecast) -> list[str]:
    """A line with the cost of the run and of a billion tokens; none where the machine has no price."""
    run, each = cost_of_run(answer, length, time), answer.dollars_per_billion_tokens
    of_run = "" if run is None else f"${run:,.2f} for the run, "
    hardware = answer.question.hardware
    at = f"at ${hardware.price or 0:,g} an hour{' for each machine' if hardware.machines > 1 else ''}"
    return [] if each is None else [f"  cost            {of_run}${each:,.0f} for a billion tokens, {at}"]


def cost_of_run(answer: Plan, length: RunLength, time: Forecast) -> float | None:
    """Dollars; None where the price or the number of steps is not known."""
    hardware, steps = answer.question.hardware, length.steps
    if hardware.price is None or steps is None:
        return None
    return hardware.machines * hardware.price / 3600 * steps * time.step_s


def _launches(answer: Plan) -> str:
    """A line where GPUs wait for launches; empty where they do not."""
    if answer.binds != "launches":
        return ""
    issued = format_seconds(answer.needs_s["launches"])
    return f"  launches bind   Python issues them in {issued}; microbatches of more tokens have fewer"


def _memory(answer: Plan) -> list[str]:
    from roundpipe_cli.costs.machine import host_memory

    hardware, verdict = answer.question.hardware, answer.verdict
    gpus = [device for device in hardware.devices if not device.is_cpu]
    smallest = min((device.memory_bytes for device in gpus), default=None)
    has = "" if smallest is None else f" of {format_bytes(smallest)}{' each' if len(gpus) > 1 else ''}"
    cache = answer.question.settings.weight_cache_bytes
    kept = f", {format_bytes(cache)} of it a cache of weights" if cache else ""
    need, when = verdict.host, ""
    if verdict.loading.total_bytes > need.total_bytes:
        need, when = verdict.loading, ", while loading"
    source = f"{format_bytes(host_memory().available_bytes)} of it free now" if hardware.is_here else "given"
    if hardware.host_memory_is_assumed:
        source = "ASSUMED: set host_memory_gib="
    host = f"{format_bytes(need.total_bytes)} of {format_bytes(hardware.host_memory_bytes)} ({source}){when}"
    device = f"{format_bytes(verdict.device.total_bytes)}{has}{kept}"
    return [f"  {'GPU' if gpus else 'CPU'} memory      {device}", f"  host memory     {host}"]


def _assumptions(answer: Plan, length: RunLength) -> list[str]:
    return [*answer.assumptions, *([length.packing] if length.packing else [])]


def _remedy_lines(answer: Plan, found: Sequence[Change]) -> list[str]:
    from roundpipe_cli.planning.fitting_recipe import fitting_recipe

    lines = [f"  {'or' if number else 'remedy':16}{change.what}" for number, change in enumerate(found)]
    if not found:
        lines = ["  remedy          none: no change of the recipe and no smaller model that the tool knows helps here"]
    fitting = fitting_recipe(answer.question, found[-1] if found else None)
    if fitting is not None:
        lines.append(f"  shipped recipe  {' '.join(fitting)}: the nearest that fits here")
    return lines


# `roundpipe plan --compare`: one row for each combination of values.


def show_comparison(
    recipe: str, overrides: Sequence[str], hardware: str | None, *, price: float | None = None, as_json: bool
) -> None:
    """Print the table, or its JSON document; refuses as `compare_plans`."""
    from roundpipe_cli.planning.predict import priced
    from roundpipe_cli.planning.what_if import compare_plans
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.run_length import with_estimated_length

    def load(path: str, words: list[str]) -> LoadedRecipe:
        return with_estimated_length(load_recipe(path, words))

    rows = compare_plans(recipe, overrides, hardware, build_counts, tell=_say_progress, load=load)
    rows = [replace(row, plan=row.plan and priced(row.plan, price)) for row in rows]
    if as_json:
        say_json({"rows": [row_document(row) for row in rows]})
        return
    width = terminal_width()
    for line in wrapped(comparison_lines(rows, width), width):
        say_data(line, colours=VERDICTS)


def _say_progress(done: int, count: int, values: Mapping[str, str]) -> None:
    if os.isatty(2):
        words = " ".join(f"{key}={value}" for key, value in values.items())
        say(f"planning {done + 1} of {count}: {words} ...")


def row_document(row: Combination) -> dict[str, Any]:
    """A row for `--json`, bytes and seconds; what a refused combination does not have is null."""
    summary, plan = row.summary, row.plan
    verdict = None if plan is None else plan.verdict
    running = plan if verdict is not None and verdict.fits else None
    return {
        "values": dict(row.values),
        "verdict": summary.word if summary is not None else "REFUSED",
        "reasons": list(summary.reasons) if summary is not None else [row.refused],
        "rests_on": dict(summary.rests_on) if summary is not None else {},
        "device_bytes": None if verdict is None else verdict.device.total_bytes,
        "host_bytes": None if verdict is None else max(verdict.host.total_bytes, verdict.loading.total_bytes),
        "step_s": None if running is None else running.step_s,
        "tokens_per_s": None if running is None else running.tokens_per_s,
        "dollars_per_billion_tokens": None if running is None else running.dollars_per_billion_tokens,
    }


LEFT_OUT = ("host", "GPU")
"""Columns to leave out where the terminal is too narrow, the first one first; --json has all."""


def comparison_lines(rows: Sequence[Combination], width: int | None = None) -> list[str]:
    """Aligned columns; the reason of a row that is slow, does not fit or is refused follows below it."""
    from roundpipe_cli.recipe.schema import LENGTH_KEY

    has_price = any(row.plan is not None and row.plan.question.hardware.price is not None for row in rows)
    cells = [[*rows[0].values, "verdict", "GPU", "host", "step", "tokens/s", *(["$/B tokens"] if has_price else [])]]
    for row in rows:
        document = row_document(row)
        need = [format_bytes(document[key]) if document[key] else "-" for key in ("device_bytes", "host_bytes")]
        step = format_seconds(document["step_s"]) if document["step_s"] else "-"
        speed = f"{document['tokens_per_s']:,.0f}" if document["tokens_per_s"] else "-"
        dollars = document["dollars_per_billion_tokens"]
        costs = ["-" if dollars is None else f"{dollars:,.0f}"] if has_price else []
        cells.append([*row.values.values(), document["verdict"], *need, step, speed, *costs])
    heading, *lines = aligned(cells, len(rows[0].values) + 1, LEFT_OUT, width)
    shown = [heading]
    for line, row in zip(lines, rows, strict=True):
        note = row.plan.question.loaded.length_note if row.plan is not None and LENGTH_KEY in row.values else None
        shown += [line, *(f"    {text}" for text in filter(None, [note, *row_document(row)["reasons"]]))]
    return shown


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="Recipe file, the name of a shipped one, or a model (hub id).", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="key=value in place of the recipe's, such as lora.r=32."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A machine: 8x4090,host_memory_gib=256, here, or a file of doctor --measure.")
    ] = None,
    solve: Annotated[bool, typer.Option("--solve", help="Also say what would fit, and the cheapest changes.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="A row for each combination of values: hardware=1x4090,2x4090 lora.r=8,16."),
    ] = False,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Dollars per hour of each machine: also show what training costs.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show every stage, memory by part, links and assumptions.")
    ] = False,
    generate: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also say how fast `generate` answers N prompts at once.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with code 5 if it does not fit.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of one step to this file.")] = None,
) -> None:
    """Say whether a recipe fits, how its layers are cut, and how long it takes. Needs no GPU and no download.

    Example: roundpipe plan qwen3-8b --hardware 2x3090,host_memory_gib=64 --solve
    """
    say(f"planning {recipe} ...")
    keep_heap()
    from roundpipe_cli.planning.generation import generation_document, generation_lines
    from roundpipe_cli.planning.predict import priced
    from roundpipe_cli.planning.solve import solve as solve_plan
    from roundpipe_cli.recipe.load import load_recipe_or_model
    from roundpipe_cli.watchdog import watching

    if compare:
        given = {"--solve": solve, "--check": check, "--svg": svg is not None, "--generate": generate is not None}
        for other in (flag for flag, is_given in given.items() if is_given):
            hint = f"leave --compare out to use {other} on one of its combinations"
            raise RefusedError(f"--compare makes several plans, and {other} is for one", hint=hint)
        show_comparison(recipe, overrides or (), hardware, price=price, as_json=json_)
        return
    loaded = load_recipe_or_model(recipe, overrides or ())
    for notice in loaded.notices:
        say(f"notice: {notice}")
    with watching(loaded.recipe.watchdog_s):
        answer, found, damages = plan_with_remedies(loaded, hardware)
        answer = priced(answer, price)
        solution = solve_plan(answer) if solve else None
    for damage in damages:
        say(f"notice: {damage}")
    if svg is not None:
        from roundpipe_cli.cli.follow import write_plan_picture

        write_plan_picture(answer, svg)
    if json_:
        more = {} if generate is None else {"generate": generation_document(answer.question, generate)}
        say_json(plan_document(answer, solution, found) | more)
    else:
        lines = plan_text(answer, solution, details=verbose, found=found)
        lines += [] if generate is None else generation_lines(answer.question, generate)
        for line in wrapped(lines, terminal_width()):
            say_data(line, colours=VERDICTS)
    if check and not answer.verdict.fits:
        raise typer.Exit(ResourceError.exit_code)


def plan_with_remedies(loaded: LoadedRecipe, hardware: str | None) -> tuple[Plan, Sequence[Change], Sequence[str]]:
    """The plan, changes that make it fit or fast, and notices of remembered answers that are damaged."""
    from roundpipe_cli.planning.answers import Answers
    from roundpipe_cli.planning.predict import make_plan
    from roundpipe_cli.planning.solve import remedies, speedups
    from roundpipe_cli.train.run_length import with_estimated_length

    answers = Answers()
    answer = make_plan(with_estimated_length(loaded), hardware, build_counts, answers)
    return answer, remedies(answer) or speedups(answer), answers.damage


def plan_document(answer: Plan, solution: Solution | None, found: Sequence[Change] = ()) -> dict[str, Any]:
    """The document that `--json` prints, with the remedies that were found. Seconds and bytes; layers in the form of a
    costs file."""
    from roundpipe_cli.costs.cost import FILE_KEYS
    from roundpipe_cli.planning.fitting_recipe import fitting_recipe
    from roundpipe_cli.planning.what_if import summary_of
    from roundpipe_cli.train.run_length import forecast, left_to_resume, run_length

    verdict, summary, length = answer.verdict, summary_of(answer), run_length(answer)
    rest, time = left_to_resume(answer, length), forecast(answer, length)
    document: dict[str, Any] = {
        "verdict": summary.word,
        "verdict_reasons": list(summary.reasons),
        "verdict_rests_on": dict(summary.rests_on),
        "fits": verdict.fits,
        "reasons": list(verdict.reasons),
        "workers": answer.question.num_workers,
        "machines": answer.question.hardware.machines,
        "max_seq_length": answer.question.settings.max_seq_length,
        "sequence_chunks": answer.question.settings.sequence_chunks,
        "forward_stages": [list(stage) for stage in answer.cut.forward_stages],
        "backward_stages": [list(stage) for stage in answer.cut.backward_stages],
        "layers": [{key: getattr(layer, key) for key in FILE_KEYS} for layer in answer.layers],
        "predicted": _predicted(answer, length, time),
        "assumptions": _assumptions(answer, length),
    }
    if rest is not None:
        seconds = rest[1] * time.step_s
        document["resume"] = {"checkpoint": str(rest[0]), "steps": rest[1], "seconds": seconds}
    if found or summary.word != "FITS":
        document["remedies"] = [_change_document(change) for change in found]
    if summary.word != "FITS":
        fitting = fitting_recipe(answer.question, found[-1] if found else None)
        document["shipped_recipe"] = None if fitting is None else " ".join(fitting)
    if solution is not None:
        document["solve"] = {
            "max_seq_length": solution.max_seq_length,
            "longest_in_memory": [
                {"change": change, "tokens": tokens, "chunks": chunks}
                for change, (tokens, chunks) in solution.longest.items()
            ],
            "micro_batch_size": solution.micro_batch_size,
            "changes": [_change_document(change) for change in solution.changes],
        }
    return document


def _predicted(answer: Plan, length: RunLength, time: Forecast) -> dict[str, Any]:
    """The figures of a step and of the run in the document."""
    verdict = answer.verdict
    return {
        "step_s": answer.step_s,
        "arithmetic_s": answer.arithmetic_s,
        "launches_s": answer.launches_s,
        "waiting_s": answer.waiting_s,
        "waiting_for_rows_s": answer.waiting_for_rows_s,
        "attention_s": answer.attention_s,
        "exchange_s": answer.exchange.waiting_s,
        "exchange_bytes_per_step": answer.exchange.num_bytes,
        "tokens_per_s": answer.tokens_per_s,
        "bubble_ratio": answer.bubble_ratio,
        "device_peak_bytes": verdict.device.total_bytes,
        "host_bytes": verdict.host.total_bytes,
        "loading_host_bytes": verdict.loading.total_bytes,
        "disk_bytes": verdict.disk.total_bytes,
        "upload_bytes_per_step": answer.links.up,
        "step_s_range": list(answer.band.around(answer.step_s)),
        "tokens_per_s_range": list(answer.tokens_per_s_range),
        "range_rests_on": answer.band.why,
        "run_steps": length.steps,
        "run_s": None if length.steps is None else length.steps * time.step_s,
        "dollars_per_billion_tokens": answer.dollars_per_billion_tokens,
        "dollars_of_run": cost_of_run(answer, length, time),
    }


def _change_document(change: Change) -> dict[str, Any]:
    return {
        "what": change.what,
        "overrides": list(change.overrides),
        "tokens_per_s": change.tokens_per_s,
        "verdict": change.word,
    }


def plan_text(
    answer: Plan, solution: Solution | None, *, details: bool = True, found: Sequence[Change] | None = None
) -> list[str]:
    """The plan as text, the verdict first."""
    from roundpipe_cli.planning.question import who_does_what
    from roundpipe_cli.train.run_length import run_length

    length = run_length(answer)
    lines = verdict_lines(answer, found, length)
    if solution is not None:
        lines += ["", *_solution_lines(answer, solution), ""]
    if not details:
        rows = 3 if len(found or ()) < 2 else 1  # a screen has room for so many
        partition = _stage_lines(answer, at_most=rows) if answer.verdict.fits else []
        return [*lines, *partition, "`-v` shows every stage, memory by part, links, and what this rests on"]
    lines += ["", *_stage_lines(answer), f"  rounds of {counted(answer.microbatches_per_round, 'microbatch')}", ""]
    unequal = who_does_what(answer.question, lambda: answer.timeline)
    lines += [*unequal, ""] if unequal else []
    lines += [*_memory_lines(answer), ""]
    lines += [*_link_lines(answer), _parts_line(answer), ""]
    if answer.explanation:
        lines += ["why this cut", *(f"  {line}" for line in answer.explanation), ""]
    return [*lines, "what this rests on", *(f"  {line}" for line in _assumptions(answer, length))]


def _parts_line(answer: Plan) -> str:
    """Parts of a step's arithmetic and waiting."""
    rows_s, attention_s = answer.waiting_for_rows_s, answer.attention_s
    waits = f"rows over workers {format_seconds(rows_s)}, transfers and updates"
    waits = f"of the waiting {waits} {format_seconds(answer.waiting_s - rows_s)}"
    return f"attention {format_seconds(attention_s)} of the arithmetic; {waits}" if attention_s else waits


def _solution_lines(answer: Plan, solution: Solution) -> list[str]:
    limit = answer.question.architecture.max_position_embeddings
    bound = " (the model's own limit)" if limit is not None and solution.max_seq_length == limit else ""
    key, size, recipe = "micro_batch_size", solution.micro_batch_size, answer.question.loaded.recipe
    if recipe.token_budget is not None:
        key, size = "micro_batch_tokens", size and size * recipe.tokens_of_full_row
    most, held = _or_none(solution.max_seq_length), list[str]()
    for words, (tokens, chunks) in solution.longest.items():
        held.append(f"{tokens:,}" + f" in {chunks} chunks" * (chunks > 1) + f" with {words}" * bool(words))
    lines = [
        "what would fit",
        f"  longest max_seq_length, all else equal: {most}{bound}",
        *(f"  longest that memory holds: {words}" for words in held if words != most),
        f"  largest {key}, all else equal: {_or_none(size)}",
    ]
    if solution.changes:
        lines.append(f"cheapest changes that make it {'fit' if not answer.verdict.fits else 'faster'}")
        fastest = max(change.speed for change in solution.changes) if len(solution.changes) > 1 else math.inf
        for number, change in enumerate(solution.changes, 1):
            lines.append(f"  {number}. {change.what}{' (the fastest)' if change.speed == fastest else ''}")
    return lines


def _or_none(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _stage_lines(answer: Plan, at_most: int | None = None) -> list[str]:
    """The partition in execution order, a line for stages that are alike.

    Args:
        at_most: lines for each direction, 3 or 1: the stages between the first and the last, or all, become one, with
            ranges.
    """
    layers = answer.question.costs.layers
    heading = f"{len(answer.cut.forward_stages)} forward, {counted(len(answer.cut.backward_stages), 'backward stage')}"
    lines = [f"  {heading:40}{'layers':>6}{'weights':>18}{'a microbatch':>14}"]
    for direction, stages in (("forward", answer.cut.forward_stages), ("backward", answer.cut.backward_stages)):
        runs = _alike(layers, stages)
        if at_most is not None and len(runs) > at_most:
            inner = (runs[1][0], runs[-2][1]) if at_most > 1 else (runs[0][0], runs[-1][1])
            runs = [runs[0], inner, runs[-1]] if at_most > 1 else [inner]
        for start, end in runs:
            inside = [layers[first : last + 1] for first, last in stages[start:end] if first <= last]
            seconds = [_stage_s(stage, direction == "backward") for stage in inside]
            first, last = min(stages[start:end])[0], max(stages[start:end])[1]
            which = f"{start}" if end == start + 1 else f"{start}-{end - 1}"
            names = f"{layers[first].name} .. {layers[last].name}" if first != last else layers[first].name
            number = _range([len(stage) for stage in inside], str)
            weights = _range([sum(layer.param_bytes for layer in stage) for stage in inside], format_bytes)
            a_microbatch = _range(seconds, format_seconds)
            lines.append(f"  {direction:9}{which:>7}  {names:22}{number:>6}{weights:>18}{a_microbatch:>14}")
    return lines


def _stage_s(stage: Sequence[LayerCost], is_backward: bool) -> float:
    """Seconds of a stage for one microbatch; in backward with the recompute."""
    if not is_backward:
        return sum(layer.forward_s for layer in stage)
    return sum((2 if layer.recompute else 1) * layer.forward_s + layer.backward_s for layer in stage)


def _range(values: Sequence[float], text: Callable[[Any], str]) -> str:
    """`430 MiB-1.2 GiB`, or one text where both ends have the same."""
    least, most = text(min(values)), text(max(values))
    if least == most:
        return most
    number, _, unit = least.partition(" ")
    return f"{number if unit == most.partition(' ')[2] else least}-{most}"


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
    hardware, verdict = answer.question.hardware, answer.verdict
    smallest = min(hardware.devices, key=lambda device: device.memory_bytes)
    has = f" of {format_bytes(smallest.memory_bytes)}" if not smallest.is_cpu else ""
    host = f" of {format_bytes(hardware.host_memory_bytes)}"
    disk = f" of {format_bytes(hardware.disk_free_bytes)} free" if hardware.disk_free_bytes is not None else ""
    needs = [(f"memory of one worker ({smallest.name})", verdict.device, has), ("host memory", verdict.host, host)]
    if verdict.loading.total_bytes > verdict.host.total_bytes:
        needs.append(("host memory while loading", verdict.loading, host))
    lines = []
    for what, need, there in [*needs, ("disk", verdict.disk, disk)]:
        lines.append(f"{what}: {format_bytes(need.total_bytes)}{there}")
        lines += [f"  {format_bytes(num_bytes):>10}  {name}" for name, num_bytes in need.largest_first]
    return lines


def _link_lines(answer: Plan) -> list[str]:
    links = answer.links
    lines = [
        "over the links in one step, all workers together",
        f"  {format_bytes(links.weights_up):>10}  weights to the workers",
        f"  {format_bytes(links.boundaries_up):>10}  hidden states and their gradients to the workers",
        f"  {format_bytes(links.boundaries_down):>10}  hidden states and their gradients back",
        f"  {format_bytes(links.gradients_down):>10}  weight gradients back",
    ]
    if answer.exchange.network_s:
        sent = f"{format_bytes(answer.exchange.num_bytes)} to and from other machines"
        lines.append(f"{sent}: {format_seconds(answer.exchange.network_s)}, from each layer's last microbatch on")
    issued_s = answer.needs_s["launches"]
    if issued_s and not _launches(answer):
        took = f"{format_seconds(issued_s)} ({100 * issued_s / answer.step_s:.0f} % of the step)"
        lines.append(f"Python issues the launches in {took}, while the GPUs compute")
    return lines
