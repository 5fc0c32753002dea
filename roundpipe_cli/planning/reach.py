"""The largest models that a machine can train, by the memory model alone: no stages are searched, nothing is simulated.

LoRA | 4-bit LoRA | full   x   the models whose figures ship with the tool
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundpipe_cli.costs.analytic import Case, case_of
from roundpipe_cli.costs.find_model import shipped_architecture, shipped_figures
from roundpipe_cli.costs.hardware import Hardware
from roundpipe_cli.costs.machine import is_large_for_cpu
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.planning.question import PlanRequest, settings_of
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.load import LoadedRecipe, load_text

METHODS = {
    "LoRA": ("method: lora",),
    "4-bit LoRA": ("method: lora", "load_in_4bit: true"),
    "full": ("method: full",),
}
"""Displayed name -> lines of a recipe; every other key has its default."""
NUM_SHOWN = 3
SEQUENCE = 2048
"""Tokens of a row."""
MICROBATCHES_PER_WORKER = 4
"""Per step: enough to keep workers busy."""


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model that fits."""

    name: str
    most_tokens_per_s: float
    """Upper bound: workers that never wait, nothing computed twice."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The largest model that a machine can train by one method."""

    method: str
    models: tuple[TrainableModel, ...]
    """The largest that fit, at most `NUM_SHOWN`, the largest first."""
    too_large: str | None
    """The next larger model, which does not fit; None if all fit."""
    reason: str | None
    """The memory it lacks, such as `host memory: needs 70 GiB, has 64 GiB: 6 GiB too little`."""


def reach_of(hardware: Hardware) -> list[Reach]:
    """The largest models that `hardware` can train, method by method."""
    return [_reach(method, lines, hardware) for method, lines in METHODS.items()]


def _reach(method: str, lines: tuple[str, ...], hardware: Hardware) -> Reach:
    count = MICROBATCHES_PER_WORKER * len(hardware.devices)
    loaded = _recipe(lines, count)
    lacks_bfloat16 = not all(device.has_bfloat16 for device in hardware.devices)
    found: list[TrainableModel] = []
    too_large = reason = None
    for architecture in _largest_first():
        if method == "full" and architecture.stored_in_4bit:
            continue  # refused by `finetune`: such weights are frozen
        own = settings_of(loaded.recipe, architecture.vocab_size)
        if own.dtype == "bfloat16" and lacks_bfloat16:
            own = replace(own, dtype="float16")
        if architecture.stored_in_4bit:
            own = replace(own, packed_as="4bit")
        case = case_of(architecture, own, hardware)
        lack = _lack(case)
        if lack is None:
            request = PlanRequest(architecture, own, hardware, case.analytic, loaded=loaded)
            tokens = own.num_microbatches * own.tokens_per_microbatch
            found.append(TrainableModel(architecture.name.rpartition("/")[2], tokens / request.least_step_s))
            if len(found) == NUM_SHOWN:
                break
        elif not found:
            too_large, reason = architecture.name.rpartition("/")[2], lack
    return Reach(method, tuple(found), too_large, reason)


def _recipe(lines: tuple[str, ...], num_microbatches: int) -> LoadedRecipe:
    given = (
        "model: any",
        "datasets: [{path: rows.jsonl}]",
        f"max_seq_length: {SEQUENCE}",
        "micro_batch_size: 1",
        f"gradient_accumulation_steps: {num_microbatches}",
        "output_dir: outputs",
    )
    return load_text("\n".join((*given, *lines)) + "\n", "doctor.yaml")


def _largest_first() -> list[Architecture]:
    found = (shipped_architecture(name) for name in shipped_figures())
    return sorted((one for one in found if one is not None), key=lambda one: -one.parameters)


def _lack(case: Case) -> str | None:
    """None if it fits, otherwise which memory is too small."""
    if is_large_for_cpu(case.hardware, case.architecture.parameters):
        return "without a GPU, models of more than 2B parameters are trained only with pipeline.devices=[cpu,cpu]"
    verdict = judge_coarsest(case)
    return None if verdict.fits else verdict.short_reasons[0]
