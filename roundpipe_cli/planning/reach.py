"""The largest models that a machine can train, by the memory model alone: no stages are searched, nothing is simulated.

LoRA, in 4 bit at least | full   x   the models whose figures ship with the tool
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundpipe_cli.costs.analytic import case_of
from roundpipe_cli.costs.find_model import shipped_architecture, shipped_figures
from roundpipe_cli.costs.hardware import Hardware
from roundpipe_cli.costs.machine import is_large_for_cpu
from roundpipe_cli.planning.question import settings_of
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.load import load_text

METHODS = {"LoRA": ("method: lora", "load_in_4bit: true"), "full": ("method: full",)}
"""Displayed name -> lines of a recipe; every other key has its default."""
NOT_ON_CPU = "without a GPU, models of more than 2B parameters are trained only with pipeline.devices=[cpu,cpu]"
NUM_SHOWN = 3
SEQUENCE = 2048
"""Tokens of a row."""
MICROBATCHES_PER_WORKER = 4
"""Per step: enough to keep workers busy."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The largest model that a machine can train by one method."""

    method: str
    models: tuple[str, ...]
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
    given = "model: any", "datasets: [{path: rows.jsonl}]", "micro_batch_size: 1", "output_dir: outputs"
    own_keys = f"max_seq_length: {SEQUENCE}", f"gradient_accumulation_steps: {count}"
    loaded = load_text("\n".join((*given, *own_keys, *lines)) + "\n", "doctor.yaml")
    lacks_bfloat16 = not all(device.has_bfloat16 for device in hardware.devices)
    fitting: list[str] = []
    too_large = reason = None
    shipped = filter(None, map(shipped_architecture, shipped_figures()))
    for architecture in sorted(shipped, key=lambda one: -one.parameters):
        if method == "full" and architecture.stored_as == "4bit":
            continue  # refused by `finetune`: such weights are frozen
        settings = settings_of(loaded.recipe, architecture)
        if settings.dtype == "bfloat16" and lacks_bfloat16:
            settings = replace(settings, dtype="float16")
        lack = NOT_ON_CPU if is_large_for_cpu(hardware, architecture.parameters) else None
        lack = lack or next(iter(judge_coarsest(case_of(architecture, settings, hardware)).short_reasons), None)
        if lack is None:
            fitting.append(architecture.name)
            if len(fitting) == NUM_SHOWN:
                break
        elif not fitting:
            too_large, reason = architecture.name.rpartition("/")[2], lack
    return Reach(method, tuple(fitting), too_large, reason)
