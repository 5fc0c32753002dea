"""The verdict of a plan: what `roundpipe plan` prints first, within a screen of 24 rows and 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe_cli.planning.predict import Plan

COMMON_HARDWARE = ("1x4090", "2x3090,host_memory_gib=64", "8x4090,host_memory_gib=256", "1xh100")

EXAMPLE_ROWS = 10_000
"""Number of steps whose time is shown where a run's own are not known."""


def verdict_lines(answer: Plan) -> list[str]:
    """The word and its reason, the model, the machine; then a figure a line."""
    from roundpipe_cli.choices import PACKED_FORMATS
    from roundpipe_cli.planning.what_if import summary_of
    from roundpipe_cli.units import format_count, format_seconds

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
    tokens = int(settings.num_microbatches * settings.tokens_per_microbatch)
    bubble = f"{tokens:,} tokens, bubble {100 * answer.bubble_ratio:.1f} %"
    if summary.word == "DOES NOT FIT":
        bubble += ", if it did fit"
    a_step = " to ".join(format_seconds(seconds) for seconds in answer.band.around(answer.step_s))
    least, most = answer.band.around(answer.tokens_per_s)
    return [
        *lines,
        *_memory(answer),
        f"  a step          {format_seconds(answer.step_s)} ({a_step}): {bubble}",
        f"  tokens/s        {answer.tokens_per_s:,.0f} ({least:,.0f} to {most:,.0f}): {answer.band.why}",
        f"  time to finish  {_time_to_finish(answer)}",
        *_hints(answer),
    ]


def _memory(answer: Plan) -> list[str]:
    from roundpipe_cli.units import format_bytes

    hardware, verdict = answer.question.hardware, answer.verdict
    gpus = [device for device in hardware.devices if not device.is_cpu]
    smallest = min((device.memory_bytes for device in gpus), default=None)
    has = "" if smallest is None else f" of {format_bytes(smallest)}{' each' if len(gpus) > 1 else ''}"
    cache = answer.question.settings.weight_cache_bytes
    kept = f", {format_bytes(cache)} of it a cache of weights" if cache else ""
    need, when = verdict.host, ""
    if verdict.loading.total_bytes > need.total_bytes:
        need, when = verdict.loading, ", while loading"
    source = "this machine's" if hardware.is_here else "given"
    if hardware.host_memory_is_assumed:
        source = "ASSUMED: set host_memory_gib="
    host = f"{format_bytes(need.total_bytes)} of {format_bytes(hardware.host_memory_bytes)} ({source}){when}"
    device = f"{format_bytes(verdict.device.total_bytes)}{has}{kept}"
    return [f"  {'GPU' if gpus else 'CPU'} memory      {device}", f"  host memory     {host}"]


def _time_to_finish(answer: Plan) -> str:
    from roundpipe_cli.planning.run_length import length_of
    from roundpipe_cli.units import counted, format_seconds

    length = length_of(answer.question.loaded, packs=answer.question.packs)
    steps, how_known = length.steps, length.why
    if steps is None:
        recipe = answer.question.loaded.recipe
        each_s = answer.step_s * recipe.num_train_epochs * EXAMPLE_ROWS / recipe.rows_per_step
        return f"{format_seconds(each_s)} for every {EXAMPLE_ROWS:,} full rows ({how_known})"
    full = "" if length.is_packed else ", if every row is full"
    return f"{format_seconds(steps * answer.step_s)} for {counted(steps, 'step')} ({how_known}){full}"


def _hints(answer: Plan) -> list[str]:
    """Commands to try next."""
    from roundpipe_cli.planning.solve import fitting_recipe

    question, lines = answer.question, []
    if not answer.verdict.fits:
        fitting = fitting_recipe(question)
        if fitting is not None:
            lines.append(f"The nearest recipe of the tool that fits: {fitting.command_name}")
    if question.is_for_lack_of_gpus:
        lines.append("No GPU here: planned for the CPU. Other machines, for instance:")
        lines += [f"  --hardware {words}" for words in COMMON_HARDWARE]
    return lines
