"""Remedies for a recipe that does not fit or is slow: the one ladder for `plan`, `plan --solve`, `init` and `finetune`.

    16 bit | 8 bit | FP8 | 4 bit | shorter sequences | lower rank | LoRA       with all weights in host memory
    the same ladder                                                            with frozen weights read from the disk
    the nearest smaller model, in 16 bit or packed                             a machine with more memory

What changes no number comes before the first rung: smaller pieces of the same step. The memory model alone chooses, in
milliseconds a try, on the coarsest cut that the devices hold; the speed of a remedy is that of its own plan.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, combinations, islice, product
from typing import Any

from roundpipe_cli.choices import LOADED_FORMATS, PACKED_FORMATS, PackedName
from roundpipe_cli.costs.analytic import analytic_costs, case_of
from roundpipe_cli.costs.find_model import shipped_architecture, shipped_figures
from roundpipe_cli.costs.hardware import Hardware, catalogue, gpu_device
from roundpipe_cli.costs.machine import is_large_for_cpu
from roundpipe_cli.costs.memory import HOST_MARGIN_BYTES
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.planning.admission import chunk_obstacle
from roundpipe_cli.planning.chunk_count import CHUNKS_KEY, chunk_counts
from roundpipe_cli.planning.predict import Plan, best_plan, known_step, reference_s
from roundpipe_cli.planning.question import (
    PlanRequest,
    ask,
    ask_again,
    ask_anew,
    larger_cards,
    rows_that_keep_busy,
    without_small_cards,
)
from roundpipe_cli.planning.token_budget import estimated_step_s
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.planning.what_if import WAITING_SHARE, Word, summary_of
from roundpipe_cli.recipe.load import LoadedRecipe, parse_override
from roundpipe_cli.units import GIB, format_count

MAX_SEQUENCE_TOKENS = 1 << 24
MAX_MICRO_BATCH = 1 << 16
NUM_CHANGES = 3
MLP_CHUNK_TOKENS = 4096
"""Tokens that keep large products busy; with 8 of 128 experts a token, each expert gets 256 rows."""
IN_CHUNKS = "each row in chunks that follow each other; other bits"
FLOAT16_SUMS = "float16 sums: gradients 20 to 26 % off float32's, bfloat16's 3 % (measured on a substitute)"
WORTH_CHUNKS = 1.05
"""Chunks are named for rows that fit whole if they make it so many times as fast."""
LONG_CHUNKS = 256
"""Least chunks in one that keeps GPUs busy."""
WORTH = 1.1
"""A change that leaves a plan slow is named if it makes it so many times as fast."""
HOST_LEFT = 0.05
"""Share of host memory that a precision leaves free, if any does."""
SLOWER = 0.03
"""A precision that changes weights less may be so much slower than the fastest."""
UNSURE = 0.025
"""A precision may be so much faster than estimated, relative to another."""


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
    """Up to the model's own limit."""
    longest: Mapping[str, tuple[int, int]]
    """(tokens, the fewest chunks) of the longest sequence that memory holds, the model's limit aside, by the change
    with which it does; `""`: all else equal."""
    micro_batch_size: int | None
    changes: tuple[Change, ...]
    """Changes that make the recipe fit, or faster where it is slow; empty where it is neither."""


def solve(plan: Plan) -> Solution:
    """Settings that would fit, and the three cheapest changes where it does not, or is slow."""
    question, changes = plan.question, list[Change]()
    if summary_of(plan).word != "FITS":
        now = plan if plan.verdict.fits else None
        changes += islice(_changes(question, now), NUM_CHANGES)
        planned = (_with_speed(question, change) for change in chain(_machines(question), _smaller_models(question)))
        good = (one for one in planned if one and one.word == "FITS" and (now is None or one.speed > now.tokens_per_s))
        changes += islice(good, NUM_CHANGES - len(changes))
    cache = question.loaded.recipe.pipeline.weight_cache  # a cache of `auto` takes spare memory only
    changes += speedups(plan)
    settings = replace(question.settings, weight_cache_bytes=0 if cache == "auto" else cache)
    lengths = longest_sequences(question)
    limit = question.architecture.max_position_embeddings or MAX_SEQUENCE_TOKENS
    return Solution(
        max_seq_length=min(limit, lengths[""][0]) if lengths else None,
        longest=lengths,
        micro_batch_size=largest_micro_batch(question.architecture, settings, question.hardware),
        changes=tuple(changes),
    )


def remedies(plan: Plan) -> tuple[Change, ...]:
    """The best remedies for a plan that does not fit or is slow; none for one that fits."""
    if summary_of(plan).word == "FITS":
        return ()
    return best_remedies(plan.question, plan if plan.verdict.fits else None)


def speedups(plan: Plan) -> tuple[Change, ...]:
    """Changes that make a plan that fits faster, each with its price; none for one that does not fit or is slow."""
    if summary_of(plan).word != "FITS":
        return ()
    return *faster_in_chunks(plan), *faster_in_float16_sums(plan)


def faster_in_float16_sums(plan: Plan) -> tuple[Change, ...]:
    """Products of float16 that add up in float16, where they make 16-bit training faster by `WORTH`; none where not.

    Its speed is that of the plan's own stages. Not for Gemma, whose activations exceed float16, nor for experts, whose
    kernels add up in float32.
    """
    question, settings, hardware = plan.question, plan.question.settings, plan.question.hardware
    architecture, other = question.architecture, replace(settings, dtype="float16", float16_accumulation=True)
    is_16_bit = settings.dtype != "float32" and not settings.float16_accumulation and hardware.accumulate == "fp32"
    is_apt = not (architecture.num_experts_per_tok or architecture.is_guess or question.reads_disk)
    gains = (one.fp16_accumulate_flops_per_s > one.fp32_accumulate_flops_per_s for one in hardware.devices)
    known = all(not one.is_cpu and not one.measured for one in hardware.devices) and all(gains)
    if not (is_16_bit and is_apt and known) or architecture.model_type.startswith("gemma"):
        return ()
    asked = replace(question, settings=other, costs=analytic_costs(architecture, other, hardware))
    speed = question.tokens_per_step / (known_step(asked, plan.cut).step_s + reference_s(asked, plan.cut))
    keys = ("dtype=float16",) if question.loaded.recipe.dtype != "float16" else ()
    change = Change((*keys, "float16_accumulation=true"), FLOAT16_SUMS, 1.5, tokens_per_s=speed, word="FITS")
    return (change,) if speed >= WORTH * plan.tokens_per_s else ()


def faster_in_chunks(plan: Plan) -> tuple[Change, ...]:
    """The number of chunks with which rows that fit whole are faster by `WORTH_CHUNKS`; none where none is."""
    question, recipe = plan.question, plan.question.given.recipe
    is_open = recipe.pipeline.sequence_chunks == "auto" and question.settings.sequence_chunks == 1
    waits = plan.bubble_ratio > 1 - 1 / WORTH_CHUNKS and question.gpus
    if not (is_open and waits and plan.verdict.fits) or chunk_obstacle(question.found.config, recipe):
        return ()
    counts = chunk_counts(recipe.row_tokens // LONG_CHUNKS)[-3:]
    tried = [Change((f"{CHUNKS_KEY}={count}",), IN_CHUNKS, 0.15) for count in counts]
    best = max(filter(None, (_with_speed(question, one) for one in tried)), key=lambda one: one.speed, default=AS_IS)
    return (best,) if best.speed >= WORTH_CHUNKS * plan.tokens_per_s else ()


def best_remedies(question: PlanRequest, now: Plan | None) -> tuple[Change, ...]:
    """The cheapest change of the recipe that makes it fit, or fast; and where there is none, the nearest smaller model
    that this machine trains fast, after what makes this one faster at least.

    Args:
        now: the plan as it is, which is slow; None: it does not fit.
    """
    found = list(islice(_changes(question, now), 1))
    if not found or found[0].word != "FITS":
        least = max((WORTH * change.speed for change in found), default=0.0)
        nearest = next((change for change in _smaller_models(question) if change.word == "FITS"), None)
        found += [nearest] if nearest is not None and nearest.speed >= least else []
    return tuple(found)


def _changes(question: PlanRequest, now: Plan | None) -> Iterator[Change]:
    """Changes of the recipe with their speeds, the cheapest first."""
    if now is not None and is_large_for_cpu(question.hardware, question.architecture.parameters):
        return  # no change makes a processor fast enough
    precision = cache(partial(best_precision, question, now))  # plans that may not be asked for
    ladder = _against_need(question, precision, from_disk=False)
    if now is not None and not question.reads_disk:
        ladder = _against_waiting(question, precision, now)
    found = list[set[str]]()
    for change in ladder:
        planned = _with_speed(question, change)
        if planned is None or (now and planned.speed < now.tokens_per_s and change != precision()):
            continue
        if now is None or planned.word == "FITS":
            found.append(set(planned.overrides))
            yield planned
    if now is None:
        ladder = _against_need(question, precision, from_disk=True)
        ladder = (one for one in ladder if not any(enough <= set(one.overrides) for enough in found))
        yield from filter(None, (_with_speed(question, one) for one in ladder))
    elif not found and (best := precision()) is not None and best.overrides:
        yield best


def best_precision(question: PlanRequest, now: Plan | None) -> Change | None:
    """The precision of the frozen weights, with its speed: the one answer for `init`, remedies and the guide's table.

    Of those that host memory holds with `HOST_LEFT` to spare, the one that changes weights least and is at most
    `SLOWER` than the fastest; where none leaves so much, of those that it holds, or else of those read from the disk.

    Args:
        now: the plan as it is; None: it does not fit.

    Returns:
        The change; one without overrides: the recipe's own; None: none fits.
    """
    settings = replace(_as_asked(question), weights_on_disk=False)
    trials = [_Trial(question, one, now) for one in _precisions(question)]
    held = [one for one in trials if _fits(question, one.change.apply(settings))]
    for tier in product((False, True), (False, True)):
        for trial in (tried := trials if tier[0] else held):
            own = (1 / (1 - SLOWER)) * trial.tokens_per_s(tier)
            rivals = (one for one in tried if own and one is not trial and one.may_beat(trial))
            if own and all(one.tokens_per_s(tier) <= own for one in rivals):
                change, plan = trial.change, trial.plan
                if now is not None and plan is not None and plan.tokens_per_s < (1 - SLOWER) * now.tokens_per_s:
                    change, plan = AS_IS, now  # reading the disk is faster
                return _as_planned(change, plan)
    return None


@dataclass(frozen=True)
class _Trial:
    """A precision; planned only where an estimate cannot tell whether it is fast enough."""

    question: PlanRequest
    change: Change
    now: Plan | None

    @cached_property
    def asked(self) -> PlanRequest | None:
        """The question with it; None: it is refused."""
        with suppress(RefusedError):
            return ask_anew(self.question, changed(self.question.given, self.change.overrides))
        return None

    @cached_property
    def plan(self) -> Plan | None:
        """None where it does not fit."""
        if not self.change.overrides:
            return self.now
        return _fitting_plan(self.asked) if self.asked is not None else None

    def tokens_per_s(self, tier: tuple[bool, bool]) -> float:
        """By its plan; 0 unless (weights are read from the disk, host memory is short) is `tier`."""
        if (plan := self.plan) is None:
            return 0.0
        most = max(plan.verdict.host.total_bytes, plan.verdict.loading.total_bytes)
        is_short = most > (1 - HOST_LEFT) * plan.question.hardware.host_memory_bytes
        return plan.tokens_per_s if (plan.question.reads_disk, is_short) == tier else 0.0

    @cached_property
    def estimate(self) -> float | None:
        """Tokens/s by formulas; None: not known."""
        asked = self.asked
        if asked is None or len(asked.gpus) < asked.num_workers or asked.reads_disk:
            return None  # the formulas are for GPUs, and know no waiting for a disk
        cases = (asked, *without_small_cards(asked))
        step_s = min(estimated_step_s(case.loaded.recipe, case) for case in cases)
        return None if step_s == math.inf else asked.tokens_per_step / step_s

    def may_beat(self, other: _Trial) -> bool:
        """Whether it may be faster by more than `SLOWER`, as far as the estimates tell."""
        mine, others = self.estimate, other.estimate
        return mine is None or others is None or (1 - SLOWER) * (1 + UNSURE) * mine > others


def _with_speed(question: PlanRequest, change: Change) -> Change | None:
    """The change with its own plan's verdict and speed; None where it does not fit after all."""
    if change.word is not None:
        return change
    return _as_planned(change, _planned(question, change))


def _as_planned(change: Change, plan: Plan | None) -> Change | None:
    """The change with its plan's verdict and speed, and the number of chunks that it found."""
    if plan is None:
        return None
    number = f"{CHUNKS_KEY}={plan.question.settings.sequence_chunks}"
    overrides = tuple(number if text == f"{CHUNKS_KEY}=auto" else text for text in change.overrides)
    return replace(change, overrides=overrides, tokens_per_s=plan.tokens_per_s, word=summary_of(plan).word)


def _planned(question: PlanRequest, change: Change) -> Plan | None:
    """The plan of a change; None where it does not fit."""
    with suppress(RefusedError):
        return _fitting_plan(_asked(question, change))
    return None


def _fitting_plan(question: PlanRequest) -> Plan | None:
    with suppress(RefusedError, ResourceError):
        plan = best_plan(question)[1]
        return plan if plan.verdict.fits else None
    return None


def _asked(question: PlanRequest, change: Change) -> PlanRequest:
    """The question with a change; refused where it does not go with other keys of the recipe, or with the model."""
    given, machine = question.given, change.machine or question.machine
    loaded = changed(given, change.overrides)
    if loaded.recipe.model == given.recipe.model and change.machine is None:
        return ask_again(question, loaded)
    return replace(ask(loaded, machine, answers=question.answers), machine_source=question.machine_source)


def changed(loaded: LoadedRecipe, overrides: tuple[str, ...]) -> LoadedRecipe:
    """The recipe with the overrides of a change, unchecked."""
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
    if question.given.recipe.pipeline.sequence_chunks == "auto":
        settings = replace(settings, sequence_chunks=1, num_microbatches=settings.num_sequences)
    if question.given.recipe.micro_batch_tokens == "auto":
        rows = math.ceil(recipe.rows_per_step / question.hardware.machines)  # `auto` takes one where room is short
        count = rows * settings.sequence_chunks
        settings = replace(settings, micro_batch_size=1, num_microbatches=count, counts_tokens=False)
    return replace(
        settings,
        weight_cache_bytes=0 if cache == "auto" else cache,
        unpacks_once=False,
        weights_on_disk=recipe.weights == "mmap",
    )


def longest_sequences(question: PlanRequest) -> dict[str, tuple[int, int]]:
    """See `Solution.longest`: all else equal, and where they are longer so, with the feed-forward part in pieces and,
    with LoRA, in the next lower precision; empty where none fits."""
    on_disk, found = question.settings.weights_on_disk, dict[str, tuple[int, int]]()
    settings = replace(_as_asked(question), weights_on_disk=on_disk)
    changes = [one for one in _candidates(question) if one.overrides == (f"mlp_chunk_tokens={MLP_CHUNK_TOKENS}",)]
    changes += _smaller_precisions(question)[:1] if settings.method == "lora" else []
    for change in (AS_IS, *changes):
        own = change.apply(settings)
        limit = question.given.recipe.token_budget or MAX_SEQUENCE_TOKENS  # a microbatch holds a row
        tokens = _longest(limit, own, partial(_fits, question))
        if tokens is None:
            break
        fitting = (one for one in _open_chunks(question, _with_length(own, tokens)) if _fits_cards(question, one))
        if change is AS_IS or tokens > found[""][0]:
            found[" ".join(change.overrides)] = tokens, next((one.sequence_chunks for one in fitting), 1)
    return found


def fits_coarsest(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> bool:
    """Whether the memories hold the coarsest cut that the devices hold."""
    return judge_coarsest(case_of(architecture, settings, hardware)).fits


def _fits(question: PlanRequest, settings: TrainingSettings, architecture: Architecture | None = None) -> bool:
    """Whether the settings fit, for another `architecture` too; in the most chunks where their number is open."""
    whole, *chunked = _open_chunks(question, settings)
    return any(_fits_cards(question, one, architecture) for one in (*chunked[-1:], whole))


def _fits_cards(question: PlanRequest, settings: TrainingSettings, architecture: Architecture | None = None) -> bool:
    """`fits_coarsest` on the question's devices, or where a plan may leave some out on those of most memory."""
    machines, model = [question.hardware], architecture or question.architecture
    if not question.lists_devices:
        machines += [replace(question.hardware, devices=kept) for kept in larger_cards(machines[0].devices)][-1:]
    return any(fits_coarsest(model, settings, machine) for machine in machines)


def _open_chunks(question: PlanRequest, settings: TrainingSettings) -> Iterator[TrainingSettings]:
    """The settings, and with rows in chunks where the recipe leaves their number open."""
    yield settings
    recipe = question.given.recipe
    if recipe.pipeline.sequence_chunks == "auto" and chunk_obstacle(question.found.config, recipe) is None:
        yield from (_chunked(settings, count) for count in chunk_counts(settings.max_seq_length))


def _chunked(settings: TrainingSettings, count: int) -> TrainingSettings:
    return replace(settings, sequence_chunks=count, num_microbatches=settings.num_sequences * count)


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
Precision = Callable[[], Change | None]
"""`best_precision`, asked where its answer is needed."""


def _against_need(question: PlanRequest, precision: Precision, *, from_disk: bool) -> Iterator[Change]:
    """Changes with which the memories hold what is needed, the cheapest first: single ones, pairs of them, shorter
    sequences.

    Args:
        precision: of `best_precision`, the only one that is named alone.
        from_disk: frozen weights are read from the disk in every round; otherwise host memory holds them.
    """
    recipe = question.loaded.recipe
    base = replace(_as_asked(question), weights_on_disk=False)

    def fits(settings: TrainingSettings) -> bool:
        on_disk = from_disk and settings.method == "lora"
        return _fits(question, replace(settings, weights_on_disk=on_disk))

    steps = list(_candidates(question))
    opening = AS_IS
    if recipe.weights in (("pinned", "pageable") if from_disk else ("mmap",)):
        cost = "frozen weights are read from the disk in every round" if from_disk else "host memory holds all weights"
        opening = Change(("weights=auto",), cost, 0.5)
        if fits(base):
            yield opening
    packings = _smaller_precisions(question)
    if from_disk and packings:  # the fewest bytes, which take all the time
        packing = best if (best := precision()) is not None and best.overrides else packings[-1]
        opening, base = _both(opening, packing), packing.apply(base)
        steps = [step for step in steps if not _keys(step) & _keys(opening)]
        if fits(base):
            yield opening
    smallest = base
    for step in steps:
        smallest = step.apply(smallest)
    if not fits(_with_length(smallest, 1)):
        return  # not even all of them together
    tried = steps + [_both(*pair) for pair in combinations(steps, 2) if not _keys(pair[0]) & _keys(pair[1])]
    for before in (AS_IS, *(() if from_disk else packings[-1:])):
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
            if change not in packings:
                yield _both(opening, change)
            elif (best := precision()) is not None and change.overrides == best.overrides:
                yield _both(opening, best) if opening.overrides else best


def _longest(limit: int, settings: TrainingSettings, fits: Callable[[TrainingSettings], bool]) -> int | None:
    """Tokens of the longest sequence that fits, in whole 64s where there are as many."""
    tokens = _largest(limit, lambda length: fits(_with_length(settings, length)))
    return tokens if tokens is None or tokens < 64 or tokens == limit else tokens // 64 * 64


def _against_waiting(question: PlanRequest, precision: Precision, now: Plan) -> Iterator[Change]:
    """Changes with which workers wait less, the cheapest first."""
    recipe, rows = question.loaded.recipe, rows_that_keep_busy(question) or 0
    if (waiting_s := now.exchange.waiting_s) > WAITING_SHARE * now.step_s:  # rows that compute twice as long
        times = math.ceil(2 * waiting_s / (now.arithmetic_s + now.launches_s))
        rows = max(rows, times * recipe.rows_per_step)
    if rows:
        overrides = (f"gradient_accumulation_steps={rows // recipe.micro_batch_size}",)
        yield Change(overrides, f"a step has {rows:,} rows in place of {recipe.rows_per_step:,}", 0.1)
    if recipe.micro_batch_tokens is None:
        yield Change(("micro_batch_tokens=auto",), "the same step in larger pieces", 0.2)
    if (best := precision()) is not None and best.overrides:
        yield best


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
            per_step = math.ceil(question.loaded.recipe.rows_per_step / smaller)
            overrides = (f"micro_batch_size={smaller}", f"gradient_accumulation_steps={per_step}")
            each = fewer * settings.sequence_chunks
        apply = partial(replace, micro_batch_size=smaller, num_microbatches=each)
        yield Change(overrides, "the same rows a step, in smaller pieces", rank, apply=apply)
    recipe, counts = question.given.recipe, chunk_counts(settings.max_seq_length)
    is_given = recipe.pipeline.sequence_chunks != "auto" and settings.sequence_chunks < max(counts, default=1)
    if is_given and chunk_obstacle(question.found.config, recipe) is None:
        apply = partial(_chunked, count=counts[-1])
        yield Change((f"{CHUNKS_KEY}=auto",), IN_CHUNKS, 0.15, apply=apply)
    if settings.head_chunk_tokens > 256:
        yield _setting("head_chunk_tokens", 256, "the head's logits in smaller pieces", rank=0.2)
    if settings.tokens_per_mlp_call > MLP_CHUNK_TOKENS:
        cost = "the blocks' feed-forward part in pieces, computed again in backward"
        yield _setting("mlp_chunk_tokens", MLP_CHUNK_TOKENS, cost, rank=0.25)
    if settings.save_total_limit > 2:
        yield _setting("save_total_limit", 2, "fewer old checkpoints are kept", rank=0.3)
    if settings.dtype == "float32":
        yield _setting("dtype", "bfloat16", "16-bit weights and activations", rank=0.9)
    yield from _smaller_precisions(question)
    if settings.method == "lora" and settings.lora_r > 8:
        yield Change(("lora.r=8",), "adapters of lower rank", 1.9, apply=partial(replace, lora_r=8))


def _setting(key: str, value: int | str, cost: str, *, rank: float) -> Change:
    """Another value of a key that settings have by the same name."""
    change: dict[str, Any] = {key: value}
    return Change((f"{key}={value}",), cost, rank, apply=lambda settings: replace(settings, **change))


TO_LORA = "trains adapters in place of all weights"


def _precisions(question: PlanRequest) -> list[Change]:
    """The precisions of the frozen weights, the least change of them first; `AS_IS` is the recipe's own. With LoRA
    only are weights frozen, a checkpoint in bitsandbytes' 4 bit has no other, and what is published packed stays so or
    takes fewer bytes."""
    recipe, stored = question.given.recipe, question.architecture.stored_as
    if stored == "4bit":
        return [AS_IS]
    to_lora = recipe.method == "full"
    own, before = replace(recipe, method="lora").packed_from(stored), recipe.packed_as
    most = PACKED_FORMATS[stored].bytes_per_param if stored else math.inf
    named = sorted(LOADED_FORMATS, key=lambda form: form.weight_change)
    smaller = [form.name for form in named if form.name == own or form.bytes_per_param < most]
    forms = list[PackedName | None]([*([None] if own is None or stored is None else []), *([stored] if stored else [])])
    options = list[Change]()
    for number, name in enumerate([*forms, *smaller]):
        if name == own and not to_lora:
            options.append(AS_IS)
            continue
        form = PACKED_FORMATS[name] if name in smaller else None
        keys = ["method=lora" if to_lora else "", f"{form.key}=true" if form else ""]
        keys += [f"{PACKED_FORMATS[before].key}=false" if before else ""]
        keys += ["load_in_16bit=false" if recipe.load_in_16bit and name else ""]
        overrides = tuple(key for key in keys if key)
        cost = form.cost if form else "" if to_lora else "frozen weights as the model has them"
        cost, rank = (f"{TO_LORA}; {cost}".removesuffix("; "), 2 + number / 100) if to_lora else (cost, 1 + number / 10)
        options.append(Change(overrides, cost, rank, apply=partial(replace, method="lora", packed_as=name)))
    return options


def _smaller_precisions(question: PlanRequest) -> list[Change]:
    """Precisions that take fewer bytes than the recipe's own, 4 bit last."""
    options = _precisions(question)
    return options[options.index(AS_IS) + 1 :] if AS_IS in options else options


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
    """Smaller models of the shipped figures that host memory holds, each in the precision for it, the largest first."""
    own, hardware, settings = (
        question.architecture,
        question.hardware,
        replace(_as_asked(question), weights_on_disk=False),
    )
    is_packable = settings.method == "lora"
    least = [AS_IS, *(_smaller_precisions(question) if is_packable else ())][-1].apply(settings)
    known = (shipped_architecture(name) for name in shipped_figures())
    smaller = sorted(
        (one for one in known if one is not None and one.parameters < own.parameters), key=lambda one: -one.parameters
    )
    for number, other in enumerate(smaller):
        form = other.stored_as if least.packed_as in (None, own.stored_as) else least.packed_as
        if is_large_for_cpu(hardware, other.parameters) or not _fits(question, replace(least, packed_as=form), other):
            continue
        change = Change((f"model={other.name}",), f"{format_count(other.parameters)} parameters", 5.0 + 0.1 * number)
        planned = _with_speed(question, change)
        precision = best_precision(_asked(question, change), _planned(question, change)) if is_packable else None
        if precision is not None and precision.overrides:
            planned = replace(_both(change, precision), tokens_per_s=precision.tokens_per_s, word=precision.word)
        if planned is not None:
            yield planned
