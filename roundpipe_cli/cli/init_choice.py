"""Settings for a model on a machine, each with its reason: those of a plan, with its remedy where it needs one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import Hardware, parse_hardware
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU, is_large_for_cpu
from roundpipe_cli.costs.models import Architecture, DType, TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.predict import Plan, best_plan
from roundpipe_cli.planning.question import ask, ask_again, hardware_of
from roundpipe_cli.planning.solve import Change, changed, fitting_recipe, remedies
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.planning.what_if import summary_of
from roundpipe_cli.recipe.load import LoadedRecipe, load_text, resolve_path
from roundpipe_cli.recipe.schema import LoraConfig, Recipe
from roundpipe_cli.units import counted, format_bytes, format_count

SEQUENCE = 2048
"""Tokens of a row; the remedies shorten it where only that fits."""
MAX_FULL_PARAMETERS = 500_000_000
"""Up to this size all weights are trained if they fit: such models are small enough to be changed as a whole."""
BUSY_TOKENS = 4096
"""A worker gets `MICROBATCHES_PER_WORKER` times as many tokens of a step, where the rows are full (rule of thumb)."""
ROWS_PER_STEP = 16
MICROBATCHES_PER_WORKER = 4
LEAST_STEPS = 10
"""Least steps of an epoch where the data have few rows (rule of thumb)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Values chosen for the recipe, with reasons."""

    recipe: Recipe
    """All values but the data's, the output's and the learning rate's."""
    overrides: tuple[str, ...]
    """`key=value` of the remedy that the recipe has."""
    tokens_per_microbatch: int
    """The value of `micro_batch_tokens: auto` on that machine."""
    learning_rate: str
    hardware: str | None
    """For the recipe's key; None: the machine it runs on."""
    machine: str
    is_here: bool
    reasons: tuple[str, ...]


def choose_settings(model: str, hardware: str | None, path: Path, num_rows: int | None = None) -> Choice:
    """Settings for `model` on the machine `hardware` in words, or on this one.

    Args:
        num_rows: of the data; None: not known, as many as a step takes.

    Raises:
        RefusedError: no such model or hardware, or nothing of it fits.
    """
    folder = path.absolute().parent
    architecture = find_architecture(model, resolve_path(model, folder))
    loaded = load_text("model: some/model\ndatasets: [{path: rows.jsonl}]\n", "recipe.yaml")
    loaded = replace(loaded, folder=folder, recipe=replace(loaded.recipe, model=model))
    machine = parse_hardware(hardware) if hardware is not None else hardware_of(loaded.recipe, architecture)
    dtype = _dtype(machine)
    method, why_method = _method(architecture, machine, dtype)
    by_processor = hardware is None and is_large_for_cpu(machine, architecture.parameters)
    length = min(SEQUENCE, architecture.max_position_embeddings or SEQUENCE)
    per_step, why_rows = _rows(length, len(machine.devices), num_rows)
    recipe = replace(
        loaded.recipe,
        method=method,
        dtype=dtype,
        max_seq_length=length,
        packing="auto",
        micro_batch_size=1,
        gradient_accumulation_steps=per_step,
        micro_batch_tokens="auto",
        lora=LoraConfig(r=16, alpha=32.0, dropout=0.0, target_modules="all-linear"),
    )
    if by_processor:
        recipe = replace(recipe, pipeline=replace(recipe.pipeline, devices=("cpu", "cpu")))
    plan, change, advice = _planned(replace(loaded, recipe=recipe), machine)
    question, settings = plan.question, plan.question.settings
    given = question.given.recipe if question.given is not None else recipe
    workers, count, tokens = question.num_workers, settings.num_microbatches, int(settings.tokens_per_microbatch)
    reasons = [
        f"{architecture.name}: {format_count(architecture.parameters)} parameters, on {machine.description} with "
        f"{format_bytes(machine.host_memory_bytes)} of host memory.",
        why_method,
        *([f"{change.what}; without it: {advice[0]}."] if change is not None else []),
        f"max_seq_length {given.max_seq_length}: longer rows are cut.",
        f"micro_batch_tokens auto: {tokens:,}, what the smallest device has room for and what keeps it busy. "
        f"gradient_accumulation_steps {per_step}: {why_rows}{counted(per_step, 'row')} a step, "
        f"{counted(count, 'full microbatch')}, {count / workers:g} for each of {counted(workers, 'worker')}.",
        f"It {'fits' if summary_of(plan).word == 'FITS' else 'is SLOW'}: "
        f"{format_bytes(plan.verdict.device.total_bytes)} of a worker's memory, "
        f"{format_bytes(plan.verdict.host.total_bytes)} of host memory, {plan.tokens_per_s:,.0f} tokens/s by "
        f"`roundpipe plan {path}`.",
        *advice[1:],
    ]
    if by_processor:
        most = format_count(MAX_PARAMETERS_ON_CPU)
        reasons.append(
            f"pipeline.devices [cpu, cpu]: there is no GPU here, and above {most} parameters `finetune` trains on the "
            "processor only where the recipe says so."
        )
    if dtype != "bfloat16":
        slow = "is slower than float32 on this processor" if dtype == "float32" else "is not there on all of the GPUs"
        reasons.append(f"dtype {dtype}: bfloat16 {slow}.")
    small = architecture.parameters < 10e9
    rate = ("2.0e-4" if small else "1.0e-4") if given.method == "lora" else ("2.0e-5" if small else "1.0e-5")
    return Choice(
        recipe=given,
        overrides=change.overrides if change is not None else (),
        tokens_per_microbatch=tokens,
        learning_rate=rate,
        hardware=hardware,
        machine=machine.description,
        is_here=machine.is_here,
        reasons=tuple(reasons),
    )


def _planned(loaded: LoadedRecipe, machine: Hardware) -> tuple[Plan, Change | None, list[str]]:
    """The plan, with the remedy where there is one that keeps the model; why that was needed, and what else helps.

    Raises:
        RefusedError: it does not fit, with what fits.
    """
    answers = Answers()
    question = ask(loaded, machine)
    plan = best_plan(question, answers)[1]
    summary, found = summary_of(plan), remedies(plan, answers)
    why = summary.reasons[0] if summary.reasons else ""
    left_to_user = ("model=", "gradient_accumulation_steps=")  # the steps are as many as the data have rows for
    own = next((change for change in found if not change.overrides[0].startswith(left_to_user)), None)
    others = [change for change in found if change is not own]
    if own is None and not plan.verdict.fits:
        fitting = fitting_recipe(question, others[0] if others else None)
        hints = [change.what for change in others] or ["no smaller model that the tool knows fits either"]
        hints += [f"this recipe of the tool fits: {' '.join(fitting)}"] if fitting is not None else []
        name = question.architecture.name
        raise RefusedError(f"{name} does not fit {machine.description}", found=why, hint="; ".join(hints))
    if own is not None:
        plan = best_plan(ask_again(question, changed(loaded, own.overrides)), answers)[1]
    return plan, own, [why, *(f"Faster: {change.what}." for change in others)]


def _dtype(machine: Hardware) -> DType:
    device = machine.devices[0]
    if device.is_cpu:
        return "bfloat16" if device.fp32_accumulate_flops_per_s > device.float32_flops_per_s else "float32"
    return "bfloat16" if all(one.has_bfloat16 for one in machine.devices) else "float16"


def _method(architecture: Architecture, machine: Hardware, dtype: DType) -> tuple[Literal["lora", "full"], str]:
    settings = TrainingSettings(SEQUENCE, num_microbatches=1, method="full", dtype=dtype)
    full = judge_coarsest(architecture, settings, machine)
    need = f"all weights would need {format_bytes(full.host.total_bytes)} of host memory"
    if full.fits and architecture.parameters <= MAX_FULL_PARAMETERS:
        return "full", f"method full: {need.replace('would need', 'need')}, and a model this small gains from it."
    fits = "which fits too: method=full" if full.fits else "which does not fit"
    return "lora", f"method lora: adapters; {need}, {fits}."


def _rows(length: int, workers: int, num_rows: int | None) -> tuple[int, str]:
    """Rows of a step, and the reason where the data have few."""
    rows = max(1, min(ROWS_PER_STEP, BUSY_TOKENS // length))
    per_step = max(ROWS_PER_STEP, MICROBATCHES_PER_WORKER * workers * rows)
    if num_rows is None or num_rows >= LEAST_STEPS * per_step:
        return per_step, ""
    return max(1, num_rows // LEAST_STEPS), (
        f"the data have only {counted(num_rows, 'row')}, for {LEAST_STEPS} steps an epoch; "
    )
