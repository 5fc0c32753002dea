"""Remedies for a recipe that does not fit or is slow: the one ladder for `plan`, `plan --solve`, `init` and `finetune`.

    16 bit | FP8 | 8 bit | 4 bit | shorter sequences | lower rank | LoRA       with all weights in host memory
    the same ladder                                                            with frozen weights read from the disk
    the nearest smaller model, in 16 bit or packed                             a machine with more memory

What changes no number comes before the first rung: smaller pieces of the same step. The memory model alone chooses, in
milliseconds a try, on the coarsest cut that the devices hold; the speed of a remedy is that of its own plan.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, islice
from typing import Any

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.costs.analytic import case_of
from roundpipe_cli.costs.find_model import shipped_architecture, shipped_figures
from roundpipe_cli.costs.hardware import Hardware, catalogue, gpu_device
from roundpipe_cli.costs.machine import is_large_for_cpu
from roundpipe_cli.costs.memory import HOST_MARGIN_BYTES
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.planning.predict import Plan, best_plan
from roundpipe_cli.planning.question import PlanRequest, ask, ask_again, rows_that_keep_busy
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.planning.what_if import Word, summary_of
from roundpipe_cli.recipe.load import LoadedRecipe, parse_override
from roundpipe_cli.units import GIB, format_count

MAX_SEQUENCE_TOKENS = 1 << 24
MAX_MICRO_BATCH = 1 << 16
NUM_CHANGES = 3
MLP_CHUNK_TOKENS = 4096
"""Tokens that keep large products busy; with 8 of 128 experts a token, each expert gets 256 rows."""
WORTH = 1.1
"""A change that leaves a plan slow is named if it makes it so many times as fast."""
PACKED: dict[PackedName, tuple[float, str]] = {
    "fp8": (1.1, "frozen weights change by 2.6 %"),
    "8bit": (1.2, "frozen weights change by 1 %; needs bitsandbytes"),
    "4bit": (1.4, "frozen weights change by 9 %; needs bitsandbytes"),
}
"""Formats in the order in which they are tried, with rank and cost (root mean square of normally distributed weights).
FP8 is first since it needs no other package."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a recipe fit, or faster."""

    overrides: tuple[str, ...]
    """`key=value` texts for the command line; empty for a change of the machine."""
    cost: str
    """The cost in words; of a change of the machine, the change."""
    rank: float
    """Price for ordering: below 1 costs at most some speed, below 2 some ability, below 3 changes the method, above
    that it costs money."""
    machine: Hardware | None = None
    """Another machine; None: the same."""
    tokens_per_s: float | None = None
    """Speed with it, as `plan` predicts it; None: not planned yet."""
    word: Word | None = None
    """`plan`'s verdict with it."""
    apply: Callable[[TrainingSettings], TrainingSettings] = field(default=lambda settings: settings, compare=False)
    """Settings with it."""

    @property
    def speed(self) -> float:
        """`tokens_per_s`, 0 where it is not planned."""
        return self.tokens_per_s or 0.0

    @property
    def what(self) -> str:
        """`load_in_4bit=true: 3,367 tokens/s; frozen weights in 4 bit ...`."""
        speed = "" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f} tokens/s"
        speed += ", still SLOW" if self.word == "SLOW" else ""
        return f"{' '.join(self.overrides) or self.cost}: " + "; ".join(
            filter(None, [speed, self.cost if self.overrides else ""])
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """Settings that would fit; None: not even the smallest value does."""

    max_seq_length: int | None
    micro_batch_size: int | None
    changes: tuple[Change, ...]
    """Changes that make the recipe fit, or faster where it is slow; empty where it is neither."""


def solve(plan: Plan) -> Solution:
    """Settings that would fit, and the three cheapest changes where it does not, or is slow."""
    question, changes = plan.question, list[Change]()
    if summary_of(plan).word != "FITS":
        now = plan if plan.verdict.fits else None
        changes += islice(_changes(question, now), NUM_CHANGES)
        rest = sorted([*_machines(question), *_smaller_models(question)], key=lambda change: change.rank)
        planned = (_with_speed(question, change) for change in rest)
        good = (one for one in planned if one and one.word == "FITS" and (now is None or one.speed > now.tokens_per_s))
        changes += islice(good, NUM_CHANGES - len(changes))
    cache = question.loaded.recipe.pipeline.weight_cache  # a cache of `auto` takes spare memory only
    settings = replace(question.settings, weight_cache_bytes=0 if cache == "auto" else cache)
    return Solution(
        max_seq_length=longest_sequence(question.architecture, settings, question.hardware),
        micro_batch_size=largest_micro_batch(question.architecture, settings, question.hardware),
        changes=tuple(changes),
    )


def remedies(plan: Plan) -> tuple[Change, ...]:
    """The best remedies for a plan that does not fit or is slow; none for one that fits."""
    if summary_of(plan).word == "FITS":
        return ()
    return best_remedies(plan.question, plan if plan.verdict.fits else None)


def best_remedies(question: PlanRequest, now: Plan | None) -> tuple[Change, ...]:
    """The cheapest change of the recipe that makes it fit, or fast; and where there is none, the nearest smaller model
    that this machine trains fast, after what makes this one faster at least.

    Args:
        now: the plan as it is, which is slow; None: it does not fit.
    """
    found = list(islice(_changes(question, now), 1))
    if not found or found[0].word != "FITS":
        least = max((WORTH * change.speed for change in found), default=0.0)
        planned = (_with_speed(question, change) for change in _smaller_models(question))
        nearest = next((change for change in planned if change is not None and change.word == "FITS"), None)
        found += [nearest] if nearest is not None and nearest.speed >= least else []
    return tuple(found)


def _changes(question: PlanRequest, now: Plan | None) -> Iterator[Change]:
    """Changes of the recipe with their speeds, the cheapest first."""
    if now is not None and is_large_for_cpu(question.hardware, question.architecture.parameters):
        return  # no change makes a processor fast enough
    waits = now is not None and not question.reads_disk
    ladder = _against_waiting(question) if waits else _against_need(question, from_disk=False)
    is_found = False
    for change in ladder:
        planned = _with_speed(question, change)
        if planned is None or (now is not None and planned.speed < now.tokens_per_s):
            continue
        if now is None or planned.word == "FITS":
            is_found = True
            yield planned
    if now is None:
        ladder = _against_need(question, from_disk=True)
        yield from filter(None, (_with_speed(question, change) for change in ladder))
    elif not is_found and (smallest := [*_packings(question)][-1:]):
        planned = _with_speed(question, smallest[0])
        if planned is not None and planned.speed > WORTH * now.tokens_per_s:
            yield planned


def _with_speed(question: PlanRequest, change: Change) -> Change | None:
    """The change with its own plan's verdict and speed; None where it does not fit after all."""
    given, machine = question.given, change.machine or question.machine
    loaded = changed(given, change.overrides)
    with suppress(RefusedError, ResourceError):
        if loaded.recipe.model == given.recipe.model and change.machine is None:
            asked = ask_again(question, loaded)
        else:
            asked = replace(ask(loaded, machine, answers=question.answers), machine_source=question.machine_source)
        plan = best_plan(asked)[1]
        if plan.verdict.fits:
            return replace(change, tokens_per_s=plan.tokens_per_s, word=summary_of(plan).word)
    return None


def changed(loaded: LoadedRecipe, overrides: tuple[str, ...]) -> LoadedRecipe:
    """The recipe with the overrides of a change, which need no check."""
    recipe = loaded.recipe
    for text in overrides:
        (key, *inner), value = parse_override(text, "a change")
        if inner:
            value = replace(getattr(recipe, str(key)), **{str(inner[0]): value})
        recipe = replace(recipe, **{str(key): value})
    return replace(loaded, recipe=recipe)


def _as_asked(question: PlanRequest) -> TrainingSettings:
    """The settings without what was decided for lack of memory, or to use what is spare."""
    recipe, settings = question.loaded.recipe, question.settings
    cache = recipe.pipeline.weight_cache
    if question.given.recipe.micro_batch_tokens == "auto":
        count = recipe.rows_per_step * settings.sequence_chunks  # `auto` takes a row where there is no room for more
        settings = replace(settings, micro_batch_size=1, num_microbatches=count, counts_tokens=False)
    return replace(
        settings,
        weight_cache_bytes=0 if cache == "auto" else cache,
        unpacks_once=False,
        weights_on_disk=recipe.weights == "mmap",
    )


def longest_sequence(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> int | None:
    """Tokens of the longest sequence that fits, all else equal, up to the model's own limit."""
    limit = architecture.max_position_embeddings or MAX_SEQUENCE_TOKENS
    return _largest(limit, lambda tokens: fits_coarsest(architecture, _with_length(settings, tokens), hardware))


def fits_coarsest(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> bool:
    """Whether the memories hold the coarsest cut that the devices hold."""
    return judge_coarsest(case_of(architecture, settings, hardware)).fits


def _with_length(settings: TrainingSettings, tokens: int) -> TrainingSettings:
    """The settings with other rows; a microbatch that is filled by tokens has fewer of them if they are longer."""
    changed = replace(settings, max_seq_length=tokens)
    if not settings.counts_tokens:
        return changed
    step_rows = int(settings.micro_batch_size * settings.num_microbatches)
    rows = min(step_rows, max(1, int(settings.micro_batch_size * settings.max_seq_length // tokens)))
    return replace(changed, micro_batch_size=rows, num_microbatches=-(-step_rows // rows))


def largest_micro_batch(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> int | None:
    """Rows of the largest microbatch that fits, all else equal."""
    return _largest(
        MAX_MICRO_BATCH, lambda rows: fits_coarsest(architecture, replace(settings, micro_batch_size=rows), hardware)
    )


def _largest(limit: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from 1 to `limit` that fits, by bisection (memory grows with it); None if 1 does not."""
    if not fits(1):
        return None
    return limit if fits(limit) else bisect_left(range(1, limit), True, key=lambda number: not fits(number))


AS_IS = Change((), "", 0.0)


def _against_need(question: PlanRequest, *, from_disk: bool) -> Iterator[Change]:
    """Changes with which the memories hold what is needed, the cheapest first: single ones, pairs of them, shorter
    sequences.

    Args:
        from_disk: frozen weights are read from the disk in every round; otherwise host memory holds them.
    """
    architecture, hardware, recipe = question.architecture, question.hardware, question.loaded.recipe
    base = replace(_as_asked(question), weights_on_disk=False)

    def fits(settings: TrainingSettings) -> bool:
        on_disk = from_disk and settings.method == "lora"
        return fits_coarsest(architecture, replace(settings, weights_on_disk=on_disk), hardware)

    steps = list(_candidates(question))
    opening = AS_IS
    if recipe.weights in (("pinned", "pageable") if from_disk else ("mmap",)):
        cost = "frozen weights are read from the disk in every round" if from_disk else "host memory holds all weights"
        opening = Change(("weights=auto",), cost, 0.5)
        if fits(base):
            yield opening
    if from_disk and (packings := list(_packings(question))):  # the fewest bytes, which take all the time
        opening, base = _both(opening, packings[-1]), packings[-1].apply(base)
        steps = [step for step in steps if not _keys(step) & _keys(opening)]
        if fits(base):
            yield opening
    smallest = base
    for step in steps:
        smallest = step.apply(smallest)
    if not fits(_with_length(smallest, 1)):
        return  # not even all of them together
    tried = steps + [_both(*pair) for pair in combinations(steps, 2) if not _keys(pair[0]) & _keys(pair[1])]
    for before in (AS_IS, *(() if from_disk else list(_packings(question))[-1:])):
        settings = before.apply(base)
        tokens = _longest(settings.max_seq_length, settings, fits)
        if tokens is not None and tokens < settings.max_seq_length:
            share = tokens / settings.max_seq_length
            cost, apply = f"longer rows are cut to {share:.0%} of what was asked", partial(_with_length, tokens=tokens)
            shorter = Change((f"max_seq_length={tokens}",), cost, 1.85 - share / 4, apply=apply)
            tried.append(_both(before, shorter))
    enough: list[frozenset[str]] = []
    for change in sorted(tried, key=lambda one: one.rank):
        keys = frozenset(text.partition("=")[0] for text in change.overrides)
        is_new = not any(one <= keys for one in enough)  # a cheaper change of the same keys is enough
        if is_new and fits(change.apply(base)):
            enough.append(keys)
            yield _both(opening, change)


def _longest(limit: int, settings: TrainingSettings, fits: Callable[[TrainingSettings], bool]) -> int | None:
    """Tokens of the longest sequence that fits, in whole 64s where there are as many."""
    tokens = _largest(limit, lambda length: fits(_with_length(settings, length)))
    return tokens if tokens is None or tokens < 64 or tokens == limit else tokens // 64 * 64


def _against_waiting(question: PlanRequest) -> Iterator[Change]:
    """Changes with which workers wait less, the cheapest first."""
    recipe, rows = question.loaded.recipe, rows_that_keep_busy(question)
    if rows is not None:
        overrides = (f"gradient_accumulation_steps={rows // recipe.micro_batch_size}",)
        yield Change(overrides, f"a step has {rows:,} rows in place of {recipe.rows_per_step:,}", 0.1)
    if recipe.micro_batch_tokens is None:
        yield Change(("micro_batch_tokens=auto",), "the same step in larger pieces", 0.2)
    yield from _packings(question)


def _candidates(question: PlanRequest) -> Iterator[Change]:
    """Single changes of the recipe that save memory, each with its price."""
    settings = _as_asked(question)
    rows, count = int(settings.micro_batch_size), settings.num_sequences
    smaller = rows
    while smaller > 1:
        smaller //= 2
        fewer, rank = math.ceil(rows * count / smaller), 0.1 + 0.01 * math.log2(rows / smaller)
        if settings.counts_tokens:
            overrides: tuple[str, ...] = (
                f"micro_batch_tokens={smaller * settings.sequences_per_row * settings.max_seq_length}",
            )
            each = fewer
        else:
            overrides = (f"micro_batch_size={smaller}", f"gradient_accumulation_steps={fewer}")
            each = fewer * settings.sequence_chunks
        apply = partial(replace, micro_batch_size=smaller, num_microbatches=each)
        yield Change(overrides, "the same rows a step, in smaller pieces", rank, apply=apply)
    if settings.head_chunk_tokens > 256:
        yield _setting("head_chunk_tokens", 256, "the head's logits in smaller pieces", rank=0.2)
    if settings.tokens_per_mlp_call > MLP_CHUNK_TOKENS:
        cost = "the blocks' feed-forward part in pieces, computed again in backward"
        yield _setting("mlp_chunk_tokens", MLP_CHUNK_TOKENS, cost, rank=0.25)
    if settings.save_total_limit > 2:
        yield _setting("save_total_limit", 2, "fewer old checkpoints are kept", rank=0.3)
    if settings.dtype == "float32":
        yield _setting("dtype", "bfloat16", "16-bit weights and activations", rank=0.9)
    yield from _packings(question)
    if settings.method == "full":
        yield _setting("method", "lora", TO_LORA, rank=2.0)
    elif settings.lora_r > 8:
        yield Change(("lora.r=8",), "adapters of lower rank", 1.9, apply=partial(replace, lora_r=8))


def _setting(key: str, value: int | str, cost: str, *, rank: float) -> Change:
    """Another value of a key that settings have by the same name."""
    change: dict[str, Any] = {key: value}
    return Change((f"{key}={value}",), cost, rank, apply=lambda settings: replace(settings, **change))


TO_LORA = "trains adapters in place of all weights"


def _packings(question: PlanRequest) -> Iterator[Change]:
    """Smaller formats for the frozen weights, the least change first; they are frozen with LoRA only."""
    settings = question.settings
    before = PACKED_FORMATS[settings.packed_as] if settings.packed_as else None
    for name, (rank, cost) in PACKED.items():
        if before is not None and PACKED_FORMATS[name].bits >= before.bits:
            continue
        overrides = [f"{PACKED_FORMATS[name].key}=true", *([f"{before.key}=false"] if before else [])]
        if settings.method == "full":
            overrides, rank, cost = ["method=lora", *overrides], 2 + rank / 10, f"{TO_LORA}; {cost}"
        yield Change(tuple(overrides), cost, rank, apply=partial(replace, method="lora", packed_as=name))


def _both(one: Change, other: Change) -> Change:
    less, more = sorted((one.rank, other.rank))
    cost = "; ".join(filter(None, (one.cost, other.cost)))
    overrides = *one.overrides, *other.overrides
    return Change(overrides, cost, more + 0.05 * less, apply=lambda settings: other.apply(one.apply(settings)))


def _keys(change: Change) -> frozenset[str]:
    """The recipe's keys that it sets; all formats of weights are one."""
    return frozenset(re.sub(r"^load_in_\w+", "load_in", text.partition("=")[0]) for text in change.overrides)


def _machines(question: PlanRequest) -> Iterator[Change]:
    """More host memory, GPUs with more memory, or both: whatever is needed to hold all weights."""
    architecture, settings, hardware = question.architecture, _as_asked(question), question.hardware
    verdict = judge_coarsest(case_of(architecture, settings, replace(hardware, disk_free_bytes=None)))
    host_gib = math.ceil((verdict.host.total_bytes + HOST_MARGIN_BYTES) / GIB / 32) * 32
    more_host = replace(hardware, host_memory_bytes=host_gib * GIB)
    if fits_coarsest(architecture, settings, replace(more_host, disk_free_bytes=None)):
        if hardware.disk_free_bytes is not None and verdict.disk.total_bytes > hardware.disk_free_bytes:
            free_gib = math.ceil(verdict.disk.total_bytes / GIB)
            machine = replace(more_host, disk_free_bytes=None)
            yield Change((), f"{free_gib} GiB of free disk for output_dir", 2.5, machine)
        if not verdict.fits:
            yield Change((), f"{host_gib} GiB of host memory", 3.0, more_host)
        return
    by_memory = sorted(catalogue().items(), key=lambda item: (item[1].memory_gib, item[1].memory_gb_per_s))
    count = len(hardware.devices)
    for name, figures in by_memory:
        other = replace(more_host, devices=(gpu_device(name, figures),) * count, disk_free_bytes=None)
        if fits_coarsest(architecture, settings, other):
            host = "" if host_gib * GIB <= hardware.host_memory_bytes else f" and {host_gib} GiB of host memory"
            what = f"GPUs of at least {figures.memory_gib:g} GiB{host}: --hardware {count}x{name}"
            yield Change((), what if not host else f"{what},host_memory_gib={host_gib}", 4.0, other)
            return


def _smaller_models(question: PlanRequest) -> Iterator[Change]:
    """Smaller models of the shipped figures that host memory holds, trained as asked or packed, the largest first."""
    own, hardware, settings = question.architecture, question.hardware, _as_asked(question)
    known = (shipped_architecture(name) for name in shipped_figures())
    smaller = sorted(
        (one for one in known if one is not None and one.parameters < own.parameters), key=lambda one: -one.parameters
    )
    for number, other in enumerate(smaller):
        if is_large_for_cpu(hardware, other.parameters):
            continue
        for change in (AS_IS, *(_packings(question) if settings.method == "lora" else ())):
            if fits_coarsest(other, replace(change.apply(settings), weights_on_disk=False), hardware):
                cost = f"{format_count(other.parameters)} parameters; {change.cost}".removesuffix("; ")
                yield Change((f"model={other.name}", *change.overrides), cost, 5.0 + 0.1 * number)
                break
