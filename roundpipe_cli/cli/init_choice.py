"""Settings for a model on a machine, each with its reason, by the memory and cost model of `plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import Hardware, parse_hardware
from roundpipe_cli.costs.models import Architecture, DType, TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.auto_choices import choose_token_budget, with_smallest_card
from roundpipe_cli.planning.question import PlanRequest, choose_tier, hardware_of
from roundpipe_cli.planning.solve import fitting_recipe
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.load import load_text, resolve_path
from roundpipe_cli.units import counted, format_bytes, format_count

SEQUENCES = (2048, 1024, 512, 256)
"""Lengths of sequences to try, in tokens, longest first."""
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

    model: str
    method: str
    max_seq_length: int
    rows_per_step: int
    tokens_per_microbatch: int
    """The value of `micro_batch_tokens: auto` on that machine."""
    learning_rate: str
    dtype: DType
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
    architecture = find_architecture(model, resolve_path(model, path.absolute().parent))
    machine = parse_hardware(hardware) if hardware is not None else _this_machine(model, architecture)
    dtype = _dtype(machine)
    method, why_method = _method(architecture, machine, dtype)
    settings = TrainingSettings(SEQUENCES[0], num_microbatches=1, method=method, dtype=dtype)
    settings, why_sequence = _sequence(architecture, settings, machine)
    settings, why_rows = _rows(architecture, settings, machine, num_rows)
    verdict = judge_coarsest(architecture, settings, machine)
    reasons = [
        f"{architecture.name}: {format_count(architecture.parameters)} parameters, on {machine.description} with "
        f"{format_bytes(machine.host_memory_bytes)} of host memory.",
        why_method,
        why_sequence,
        why_rows,
        f"It fits: {format_bytes(verdict.device.total_bytes)} of a worker's memory at most, "
        f"{format_bytes(verdict.host.total_bytes)} of host memory; `roundpipe plan {path}` says how fast it is.",
    ]
    if dtype != "bfloat16":
        slow = "is slower than float32 on this processor" if dtype == "float32" else "is not there on all of the GPUs"
        reasons.append(f"dtype {dtype}: bfloat16 {slow}.")
    small = architecture.parameters < 10e9
    rate = ("2.0e-4" if small else "1.0e-4") if method == "lora" else ("2.0e-5" if small else "1.0e-5")
    return Choice(
        model=model,
        method=method,
        max_seq_length=settings.max_seq_length,
        rows_per_step=int(settings.micro_batch_size * settings.num_microbatches),
        tokens_per_microbatch=int(settings.tokens_per_microbatch),
        learning_rate=rate,
        dtype=dtype,
        hardware=hardware,
        machine=machine.description,
        is_here=machine.is_here,
        reasons=tuple(reasons),
    )


def _this_machine(model: str, architecture: Architecture) -> Hardware:
    recipe = load_text(f"model: {model!r}\ndatasets: [{{path: rows.jsonl}}]\n", "recipe.yaml").recipe
    return hardware_of(recipe, architecture)


def _dtype(machine: Hardware) -> DType:
    device = machine.devices[0]
    if device.is_cpu:
        return "bfloat16" if device.fp32_accumulate_flops_per_s > device.float32_flops_per_s else "float32"
    return "bfloat16" if all(one.has_bfloat16 for one in machine.devices) else "float16"


def _method(architecture: Architecture, machine: Hardware, dtype: DType) -> tuple[Literal["lora", "full"], str]:
    settings = TrainingSettings(SEQUENCES[-1], num_microbatches=1, method="full", dtype=dtype)
    full = judge_coarsest(architecture, settings, machine)
    need = f"all weights would need {format_bytes(full.host.total_bytes)} of host memory"
    if full.fits and architecture.parameters <= MAX_FULL_PARAMETERS:
        return "full", f"method full: {need.replace('would need', 'need')}, and a model this small gains from it."
    fits = "which fits too: method=full" if full.fits else "which does not fit"
    return "lora", f"method lora: adapters; {need}, {fits}."


def _sequence(
    architecture: Architecture, settings: TrainingSettings, machine: Hardware
) -> tuple[TrainingSettings, str]:
    limit = architecture.max_position_embeddings or SEQUENCES[0]
    for tokens in SEQUENCES:
        tried = replace(settings, max_seq_length=min(tokens, limit))
        if judge_coarsest(architecture, tried, machine).fits:
            longer = "longer rows are cut" if tokens == SEQUENCES[0] else "more does not fit; longer rows are cut"
            return tried, f"max_seq_length {tried.max_seq_length}: {longer}."
    verdict = judge_coarsest(architecture, settings, machine)
    loaded = load_text("model: some/model\ndatasets: [{path: rows.jsonl}]\n", "recipe.yaml")
    question = PlanRequest(loaded, architecture, settings, machine, analytic_costs(architecture, settings, machine))
    fitting = fitting_recipe(question)
    raise RefusedError(
        f"{architecture.name} does not fit {machine.description}, not even with {SEQUENCES[-1]} tokens by LoRA",
        found=verdict.reasons[0],
        hint=f"this recipe of the tool fits: {fitting.command_name}" if fitting else "a smaller model, more memory",
    )


def _rows(
    architecture: Architecture, settings: TrainingSettings, machine: Hardware, num_rows: int | None
) -> tuple[TrainingSettings, str]:
    """Rows of a step, and the microbatches that `micro_batch_tokens: auto` makes of them."""
    workers = len(machine.devices)
    rows = max(1, min(ROWS_PER_STEP, BUSY_TOKENS // settings.max_seq_length))
    per_step = max(ROWS_PER_STEP, MICROBATCHES_PER_WORKER * workers * rows)
    are_few = num_rows is not None and num_rows < LEAST_STEPS * per_step
    if are_few:
        per_step = max(1, (num_rows or 0) // LEAST_STEPS)
    recipe = load_text("model: some/model\ndatasets: [{path: rows.jsonl}]\n", "recipe.yaml").recipe
    by_row = replace(settings, num_microbatches=per_step)
    smallest = with_smallest_card(machine)
    by_row = choose_tier(architecture, by_row, smallest)
    may_hold = settings.method == "lora" and recipe.may_hold_all_weights
    tokens = choose_token_budget(architecture, by_row, smallest, may_hold=may_hold)
    rows = min(per_step, tokens // settings.max_seq_length)
    count = per_step // rows
    why = f"the data have only {counted(num_rows or 0, 'row')}, for {LEAST_STEPS} steps an epoch; " if are_few else ""
    return replace(settings, micro_batch_size=rows, num_microbatches=count), (
        f"micro_batch_tokens auto: {tokens:,}, what the smallest device has room for and what keeps it busy. "
        f"gradient_accumulation_steps {per_step}: {why}{counted(per_step, 'row')} a step, "
        f"{counted(count, 'full microbatch')}, {count / workers:g} for each of {counted(workers, 'worker')}."
    )
