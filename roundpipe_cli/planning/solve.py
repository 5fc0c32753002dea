"""Settings that would fit: the longest sequence, the largest microbatch, and the cheapest changes to a recipe.

Answers come from the memory model alone, on the coarsest cut that the devices hold, so each try takes a millisecond and
every answer is exact for the model: one more token, or one more row, does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.find_model import shipped_architecture, shipped_figures
from roundpipe_cli.costs.hardware import Hardware, catalogue, gpu_device
from roundpipe_cli.costs.memory import HOST_MARGIN_BYTES
from roundpipe_cli.costs.models import Architecture, TrainingSettings
from roundpipe_cli.planning.question import PlanRequest, settings_of
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import ShippedRecipe, shipped_recipes
from roundpipe_cli.units import GIB, format_count

# Which shipped recipe fits a machine that another recipe does not fit.


def fitting_recipe(question: PlanRequest) -> ShippedRecipe | None:
    """The shipped recipe that fits the question's machine: of the same model and method if there is one, then of the
    same model, then of the next smaller model of the same family, then of the next smaller one of any."""
    candidates = sorted(_shipped_candidates(question.architecture), key=lambda one: _distance(question, one))
    for recipe, architecture, settings in candidates:
        if judge_coarsest(architecture, settings, question.hardware).fits:
            return recipe
    return None


RecipeCandidate = tuple[ShippedRecipe, Architecture, TrainingSettings]


def _shipped_candidates(wanted: Architecture) -> Iterator[RecipeCandidate]:
    for shipped in shipped_recipes():
        recipe = load_recipe(shipped.path).recipe
        architecture = shipped_architecture(recipe.model)
        if architecture is not None and architecture.parameters <= wanted.parameters:
            yield shipped, architecture, settings_of(recipe)


def _distance(question: PlanRequest, candidate: RecipeCandidate) -> tuple[bool, bool, int, bool, float]:
    """Distance of a recipe from what was asked, for sorting."""
    recipe, architecture, settings = candidate
    wanted = question.architecture
    other_machine = 0.0
    if recipe.verdict is not None:  # a recipe for about as many GPUs keeps them busy
        other_machine = abs(int(recipe.verdict.hardware.partition("x")[0]) - question.num_workers)
    return (
        architecture.parameters != wanted.parameters,
        architecture.model_type != wanted.model_type,
        -architecture.parameters,
        settings.method != question.settings.method,
        other_machine,
    )


MAX_SEQUENCE_TOKENS = 1 << 24
MAX_MICRO_BATCH = 1 << 16
NUM_CHANGES = 3
MLP_CHUNK_TOKENS = 4096
"""Tokens that keep large products busy; with 8 of 128 experts a token, each expert gets 256 rows."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a recipe fit."""

    overrides: tuple[str, ...]
    """`key=value` texts for the command line; empty for a change of the machine."""
    what: str
    """The change and what it costs, in words."""
    rank: float
    """Price for ordering: below 1 costs at most some speed, below 2 some ability, below 3 changes the method, above
    that it costs money."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Settings that would fit; None: not even the smallest value does."""

    max_seq_length: int | None
    micro_batch_size: int | None
    changes: tuple[Change, ...]
    """Changes that make the recipe fit; empty where it fits as it is."""


def solve(
    architecture: Architecture,
    settings: TrainingSettings,
    hardware: Hardware,
) -> Solution:
    """Settings that would fit."""
    fits_as_is = judge_coarsest(architecture, settings, hardware).fits
    return Solution(
        max_seq_length=longest_sequence(architecture, settings, hardware),
        micro_batch_size=largest_micro_batch(architecture, settings, hardware),
        changes=() if fits_as_is else cheapest_changes(architecture, settings, hardware),
    )


def longest_sequence(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> int | None:
    """Tokens of the longest sequence that fits, all else equal, up to the model's own limit."""
    limit = architecture.max_position_embeddings or MAX_SEQUENCE_TOKENS
    return _largest(limit, lambda tokens: judge_coarsest(architecture, _with_length(settings, tokens), hardware).fits)


def _with_length(settings: TrainingSettings, tokens: int) -> TrainingSettings:
    """The same with other rows; a microbatch that is filled by tokens has fewer of them if they are longer."""
    changed = replace(settings, max_seq_length=tokens)
    if not settings.counts_tokens:
        return changed
    step_rows = int(settings.micro_batch_size * settings.num_microbatches)
    rows = min(step_rows, max(1, int(settings.micro_batch_size * settings.max_seq_length // tokens)))
    return replace(changed, micro_batch_size=rows, num_microbatches=-(-step_rows // rows))


def largest_micro_batch(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> int | None:
    """Rows of the largest microbatch that fits, all else equal."""
    return _largest(
        MAX_MICRO_BATCH,
        lambda rows: judge_coarsest(architecture, replace(settings, micro_batch_size=rows), hardware).fits,
    )


def _largest(limit: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from 1 to `limit` that fits, by bisection (memory grows with it); None if 1 does not."""
    if not fits(1):
        return None
    low, high = 1, limit + 1
    if fits(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cheapest_changes(
    architecture: Architecture,
    settings: TrainingSettings,
    hardware: Hardware,
) -> tuple[Change, ...]:
    """The three cheapest changes that make it fit: single ones, then pairs, then another machine."""
    candidates = list(_candidates(architecture, settings))
    found: list[tuple[Change, frozenset[str]]] = []
    for size in (1, 2):
        joined = [
            (change, steps)
            for steps in combinations(candidates, size)
            if (change := _join([step[0] for step in steps])) is not None
        ]
        for change, steps in sorted(joined, key=lambda item: item[0].rank):
            keys = frozenset(override.split("=")[0] for override in change.overrides)
            if any(enough <= keys for _, enough in found):
                continue  # a cheaper change of the same keys is enough
            changed = settings
            for _, apply in steps:
                changed = apply(changed)
            if judge_coarsest(architecture, changed, hardware).fits:
                found.append((change, keys))
    changes = [change for change, _ in found]
    sequence = longest_sequence(architecture, settings, hardware)
    if sequence is not None and sequence < settings.max_seq_length:
        share = sequence / settings.max_seq_length
        changes.append(
            Change(
                (f"max_seq_length={sequence}",),
                f"max_seq_length={sequence}: longer rows are cut to {share:.0%} of what you asked",
                1.0 + (1 - share) * 0.9,
            )
        )
    changes += _machines(architecture, settings, hardware)
    if len(changes) < NUM_CHANGES:
        changes += _smaller_models(architecture, settings, hardware)
    return tuple(sorted(changes, key=lambda change: change.rank)[:NUM_CHANGES])


SolveStep = tuple[Change, Callable[[TrainingSettings], TrainingSettings]]


def _candidates(architecture: Architecture, settings: TrainingSettings) -> Iterator[SolveStep]:
    """Changes of the recipe that save memory, each with its price."""
    rows, count = int(settings.micro_batch_size), settings.num_sequences
    for smaller in sorted({rows // part for part in range(2, 17)} | {1}, reverse=True):
        if 1 <= smaller < rows:
            fewer, rank = math.ceil(rows * count / smaller), 0.1 + 0.01 * math.log2(rows / smaller)
            yield (
                _fewer_tokens(smaller, fewer, rank, settings)
                if settings.counts_tokens
                else _fewer_rows(smaller, fewer, rank)
            )
    if settings.head_chunk_tokens > 256:
        yield (
            Change(("head_chunk_tokens=256",), "head_chunk_tokens=256: the head's logits in smaller pieces", 0.2),
            lambda s: replace(s, head_chunk_tokens=256),
        )
    if settings.tokens_per_mlp_call > MLP_CHUNK_TOKENS:
        text = f"mlp_chunk_tokens={MLP_CHUNK_TOKENS}"
        yield (
            Change((text,), f"{text}: the blocks' feed-forward part in pieces, computed again in backward", 0.25),
            lambda s: replace(s, mlp_chunk_tokens=MLP_CHUNK_TOKENS),
        )
    if settings.save_total_limit > 2:
        yield (
            Change(("save_total_limit=2",), "save_total_limit=2: fewer old checkpoints are kept", 0.3),
            lambda s: replace(s, save_total_limit=2),
        )
    if settings.dtype == "float32":
        yield (
            Change(("dtype=bfloat16",), "dtype=bfloat16: 16-bit weights and activations", 0.9),
            lambda s: replace(s, dtype="bfloat16"),
        )
    if settings.method == "full":
        yield (
            Change(("method=lora",), "method=lora: trains adapters in place of all weights", 2.0),
            lambda s: replace(s, method="lora"),
        )
    elif settings.packed_as != "4bit":
        instead = [f"{PACKED_FORMATS[settings.packed_as].key}=false"] if settings.packed_as else []
        yield (
            Change(
                ("load_in_4bit=true", *instead),
                "load_in_4bit=true: frozen weights in 4 bit",
                2.1,
            ),
            lambda s: replace(s, packed_as="4bit"),
        )
    if settings.method == "lora" and settings.lora_r > 8:
        yield (
            Change(("lora.r=8",), "lora.r=8: adapters of lower rank", 1.9),
            lambda s: replace(s, lora_r=8),
        )


def _fewer_rows(rows: int, count: int, rank: float) -> SolveStep:
    return (
        Change(
            (f"micro_batch_size={rows}", f"gradient_accumulation_steps={count}"),
            f"micro_batch_size={rows} gradient_accumulation_steps={count}: the same rows a step, in smaller pieces",
            rank,
        ),
        lambda s: replace(s, micro_batch_size=rows, num_microbatches=count * s.sequence_chunks),
    )


def _fewer_tokens(rows: int, count: int, rank: float, settings: TrainingSettings) -> SolveStep:
    text = f"micro_batch_tokens={rows * settings.sequences_per_row * settings.max_seq_length}"
    return (
        Change((text,), f"{text}: the same rows a step, in smaller pieces", rank),
        lambda s: replace(s, micro_batch_size=rows, num_microbatches=count),
    )


def _join(changes: list[Change]) -> Change | None:
    """Several changes as one; None where two set the same key."""
    overrides = [override for change in changes for override in change.overrides]
    keys = [override.split("=")[0] for override in overrides]
    if len(set(keys)) < len(keys):
        return None
    ranks = sorted((change.rank for change in changes), reverse=True)
    return Change(tuple(overrides), "; ".join(change.what for change in changes), ranks[0] + 0.05 * sum(ranks[1:]))


def _machines(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> Iterator[Change]:
    """More host memory, GPUs with more memory, or both: whatever is needed."""
    verdict = judge_coarsest(architecture, settings, replace(hardware, disk_free_bytes=None))
    host_gib = math.ceil((verdict.host.total_bytes + HOST_MARGIN_BYTES) / GIB / 32) * 32
    more_host = replace(hardware, host_memory_bytes=host_gib * GIB)
    if judge_coarsest(architecture, settings, replace(more_host, disk_free_bytes=None)).fits:
        if hardware.disk_free_bytes is not None and verdict.disk.total_bytes > hardware.disk_free_bytes:
            free_gib = math.ceil(verdict.disk.total_bytes / GIB)
            yield Change((), f"{free_gib} GiB of free disk for output_dir", 2.5)
        if not verdict.fits:
            yield Change((), f"{host_gib} GiB of host memory", 3.0)
        return
    by_memory = sorted(catalogue().items(), key=lambda item: (item[1].memory_gib, item[1].memory_gb_per_s))
    count = len(hardware.devices)
    for name, figures in by_memory:
        other = replace(more_host, devices=(gpu_device(name, figures),) * count, disk_free_bytes=None)
        if judge_coarsest(architecture, settings, other).fits:
            host = "" if host_gib * GIB <= hardware.host_memory_bytes else f" and {host_gib} GiB of host memory"
            what = f"GPUs of at least {figures.memory_gib:g} GiB{host}: --hardware {count}x{name}"
            yield Change((), what if not host else f"{what},host_memory_gib={host_gib}", 4.0)
            return


def _smaller_models(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> Iterator[Change]:
    """The largest models of the shipped figures that fit, trained as asked, and by LoRA."""
    smaller = sorted(
        (name for name, figures in shipped_figures().items() if figures["parameters"] < architecture.parameters),
        key=lambda name: -int(shipped_figures()[name]["parameters"]),
    )
    for method in dict.fromkeys((settings.method, "lora")):
        changed = replace(settings, method="lora" if method == "lora" else "full")
        num_found = 0
        for name in smaller:
            other = shipped_architecture(name)
            if other is not None and judge_coarsest(other, changed, hardware).fits:
                overrides = (f"model={name}",) + (() if method == settings.method else (f"method={method}",))
                what = f"{' '.join(overrides)}: a smaller model, {format_count(other.parameters)} parameters"
                yield Change(overrides, what, 5.0 + 0.1 * num_found + (0.05 if method != settings.method else 0.0))
                num_found += 1
            if num_found == NUM_CHANGES - 1:
                break
