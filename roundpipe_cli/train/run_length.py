"""The length of a run before it begins: its steps, the tokens of its rows, and the time that they take. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.data.batching import BatchSampler
from roundpipe_cli.data.files import RowCount
from roundpipe_cli.data.lengths import TokenCounter, sample_lengths, token_counter
from roundpipe_cli.data.settings import DatasetSpec, spec_of
from roundpipe_cli.data.sources import count_dataset
from roundpipe_cli.data.tokenized import PackingChoice, RowMix, decide_packing, held_out_count
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.planning.admission import packing_obstacle
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.predict import Plan, best_plan, reference_s, simulate_step
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.prepare.steps import (
    Lengths,
    UsualStep,
    WaitingRemedy,
    find_waiting,
    mix_of_counts,
    sampler_of,
    usual_step,
)
from roundpipe_cli.units import counted, format_seconds

EXAMPLE_ROWS = 10_000
"""Number of rows whose time is shown where a run's own are not known."""
MOST_ROWS = 1_000_000
"""Rows whose microbatches are made; more are counted by their mean."""
BYTES_PER_TOKEN = 4
"""Bytes of text a token: usual for English and code (assumed); other languages have fewer, so longer runs."""
MAX_BYTE_VOCABULARY = 1024
"""The largest vocabulary that is taken for one of single bytes."""
MOST_OFF = 1.5
"""An estimate of a row's tokens is taken to be within so many times the truth; where `packing: auto` would answer
differently within that, the plan leaves the answer to `roundpipe data`, which counts."""


UNDECIDED = "packed or not as `roundpipe data` says"


@dataclass(frozen=True, slots=True)
class RunLength:
    """Optimizer steps of a whole run."""

    steps: int | None
    """None: the rows cannot be counted here."""
    why: str
    """How the number is known, or why it is not."""
    is_packed: bool = False
    """Rows are packed, so there are fewer sequences than rows."""
    packing: str = ""
    """The answer of `packing: auto`, a line; empty where the recipe says yes or no."""
    step: UsualStep | None = None
    """By the estimated tokens of the rows; None: they cannot be read here."""
    num_sequences: int = 0
    """Sequences of an epoch."""


def length_of(
    loaded: LoadedRecipe,
    obstacle: str | None = None,
    bytes_per_token: float = BYTES_PER_TOKEN,
    found: FoundConfig | None = None,
) -> RunLength:
    """The length of a recipe's run, as far as the recipe and the files that it names say.

    Args:
        obstacle: why the model or the recipe cannot train on packed rows; None where it can.
        found: the model's configuration, beside which its tokenizer may be.
    """
    recipe = loaded.recipe
    counts: list[RowCount] = []
    specs = [spec_of(entry) for entry in recipe.datasets]
    for spec in specs:
        count = count_dataset(spec, loaded.folder)
        if count is None:
            is_packed, how, line = _packing(recipe, None, None, obstacle)
            if recipe.max_steps is not None:
                return RunLength(recipe.max_steps, f"max_steps{how}", is_packed, line)
            return RunLength(None, f"the rows of {spec.path} cannot be counted here", is_packed, line)
        if count.is_exact and not count.num_rows:
            return RunLength(None, f"{spec.path} has no rows, which `finetune` refuses")
        counts.append(count)
    total = sum(count.num_rows for count in counts)
    share = 1 - held_out_count(total, recipe.val_set_size) / max(1, total)
    mix = mix_of_counts(recipe, [round(count.num_rows * share) for count in counts])
    rows, lengths = mix.rows_per_epoch, None
    if rows and mix.num_rows <= MOST_ROWS:
        folder, template = (None, None) if found is None else (found.folder, found.config.get("chat_template"))
        lengths = _lengths(loaded, specs, mix, token_counter(folder, template, bytes_per_token))
    tokens = None if lengths is None else float(lengths[mix.order(0)].mean())
    if tokens is None and rows and all(count.num_bytes for count in counts):
        tokens = sum(count.num_bytes for count in counts) / bytes_per_token / total
    is_packed, how, line = _packing(recipe, rows, tokens, obstacle)
    sequences, is_exact, step = rows, all(count.is_exact for count in counts), None
    sampler = None if lengths is None else _sampler(recipe, mix, lengths, is_packed=is_packed)
    if sampler is not None and lengths is not None:
        sequences = sampler.num_sequences(0)
        step = usual_step(sampler, lengths, math.ceil(sequences / recipe.rows_per_step))
    elif is_packed and tokens is not None:
        sequences = _packed_sequences(rows, tokens, recipe.max_seq_length)
    elif is_exact and rows < recipe.rows_per_step:
        how += f"; fewer rows than the {recipe.rows_per_step} of a step, which `finetune` refuses"
    if recipe.max_steps is not None:
        return RunLength(recipe.max_steps, f"max_steps{how}", is_packed, line, step, sequences)
    why = f"{'' if is_exact else 'about '}{counted(total, 'row')}"
    if tokens is not None:
        why += f" of about {max(1, round(min(tokens, recipe.max_seq_length)))} tokens"
    steps = math.ceil(sequences / recipe.rows_per_step) * recipe.num_train_epochs
    return RunLength(steps, why + how, is_packed, line, step, sequences)


def _lengths(loaded: LoadedRecipe, specs: Sequence[DatasetSpec], mix: RowMix, counter: TokenCounter) -> Lengths | None:
    """Estimated tokens of every row, as far as rows are kept whole; None where no sample can be read."""
    recipe, made = loaded.recipe, list[Lengths]()
    for spec, rows in zip(specs, mix.source_rows, strict=True):
        sample = sample_lengths(replace(spec, pairs=recipe.trains_pairs), loaded.folder, counter)
        if not sample:
            return None
        made.append(np.resize(np.minimum(np.array(sample, dtype=np.int64), recipe.max_seq_length), rows))
    return np.concatenate(made)


def _sampler(recipe: Recipe, mix: RowMix, lengths: Lengths, *, is_packed: bool) -> BatchSampler | None:
    """None where the rows are fewer than a step takes."""
    decided = replace(recipe, packing=is_packed) if recipe.packing == "auto" else recipe
    with suppress(RefusedError):
        return sampler_of(decided, mix, lengths, lengths)
    return None


def _packed_sequences(rows: int, tokens: float, max_seq_length: int) -> int:
    return math.ceil(rows * min(tokens, max_seq_length) / max_seq_length)


def _packing(recipe: Recipe, rows: int | None, tokens: float | None, obstacle: str | None) -> tuple[bool, str, str]:
    """Whether rows of so many estimated tokens are packed, that as the end of a phrase, a line if we are to choose."""
    if recipe.packing != "auto":
        words = ", packed" if tokens is not None else ", before packing"
        return recipe.packs, words if recipe.packs else "", ""
    choice = _packing_choice(recipe, rows, tokens, obstacle)
    if choice is not None:
        line = choice.describe() + ("" if tokens is None else "; tokens are estimated")
        return choice.packs, f", {'packed' if choice.packs else 'not packed'}", line
    known = "the tokens of a row are not known here" if tokens is None else f"rows have about {tokens:,.0f} tokens"
    return False, f", {UNDECIDED}", f"packing (auto): {UNDECIDED}: {known}"


def _packing_choice(
    recipe: Recipe, rows: int | None, tokens: float | None, obstacle: str | None
) -> PackingChoice | None:
    """The answer of `packing: auto` by the rule of `data` and a run; None where only counted tokens can tell."""
    if tokens is None and obstacle is not None:
        return PackingChoice(False, obstacle)
    if not rows:
        return None
    most, answers = recipe.max_seq_length, list[PackingChoice]()
    for each in (1, most / 2, most) if tokens is None else (tokens, tokens / MOST_OFF, tokens * MOST_OFF):
        whole = math.ceil(rows / max(1, most // max(1, round(each))))  # a sequence has whole rows only
        for count in (_packed_sequences(rows, each, most), whole):
            answers.append(decide_packing(recipe, each, rows, partial(int, count), obstacle=obstacle))
    if len({answer.packs for answer in answers}) > 1:
        return None
    too_few = PackingChoice(False, f"{counted(rows, 'row')} would make too few steps")
    return too_few if tokens is None else answers[0]


def run_length(answer: Plan) -> RunLength:
    """The length of the run that is planned."""
    question = answer.question
    obstacle = packing_obstacle(question.found, question.loaded.recipe)
    of_bytes = question.architecture.vocab_size <= MAX_BYTE_VOCABULARY
    bytes_per_token = 1 if of_bytes else BYTES_PER_TOKEN
    return length_of(question.loaded, obstacle, bytes_per_token, question.found)


def time_to_finish(answer: Plan, length: RunLength) -> str:
    """`11 s for 10 steps (120 rows of about 61 tokens, not packed)`; a full step's time where rows are not known."""
    recipe, steps = answer.question.loaded.recipe, length.steps
    if steps is None:
        each_s = answer.step_s * recipe.num_train_epochs * EXAMPLE_ROWS / recipe.rows_per_step
        return f"{format_seconds(each_s)} for every {EXAMPLE_ROWS:,} full rows ({length.why})"
    if length.step is None:
        full = "" if length.is_packed else ", if every row is full"
        return f"{format_seconds(steps * answer.step_s)} for {counted(steps, 'step')} ({length.why}){full}"
    step_s, bubble = usual_figures(answer, length.step)
    waits = _waiting(answer, length.step, bubble, length.num_sequences)
    least, most = (format_seconds(steps * seconds) for seconds in answer.band.around(step_s))
    text = f"{format_seconds(steps * step_s)} ({least} to {most}) for {counted(steps, 'step')} ({length.why}), each "
    text += f"{length.step.tokens:,.0f} tokens in {counted(length.step.num_microbatches, 'microbatch')}"
    return text if waits is None else f"{text}, for which workers wait {bubble:.0%}"


def usual_figures(answer: Plan, step: UsualStep) -> tuple[float, float]:
    """Seconds of such a step with the plan's stages, and the share of it in which workers wait."""
    question, count = answer.question, step.num_microbatches * answer.question.settings.sequence_chunks
    own = replace(question.settings, max_seq_length=step.length, micro_batch_size=step.rows, num_microbatches=count)
    analytic = analytic_costs(question.architecture, own, question.hardware)
    link = question.costs.link_bytes_per_s  # of the disk, where weights are read from there
    analytic = replace(analytic, costs=replace(analytic.costs, link_bytes_per_s=link))
    asked = replace(question, settings=own, analytic=analytic)
    per_round = answer.cut.microbatches_per_round and min(answer.microbatches_per_round, count)
    cut = replace(answer.cut, microbatches_per_round=per_round)
    simulated = simulate_step(asked, cut)
    return simulated.step_s + reference_s(asked, cut), simulated.bubble_ratio


def waiting_of(answer: Plan, length: RunLength) -> WaitingRemedy | None:
    """Workers that wait since a usual step has few microbatches, in the words of `finetune`."""
    if length.step is None:
        return None
    _, bubble = usual_figures(answer, length.step)
    return _waiting(answer, length.step, bubble, length.num_sequences)


def _waiting(answer: Plan, step: UsualStep, bubble: float, num_sequences: int) -> WaitingRemedy | None:
    question, count = answer.question, step.num_microbatches
    return find_waiting(question.loaded.recipe, question.num_workers, count, bubble, num_sequences=num_sequences)


def tell_length(asked: PlanRequest, tell: Tell) -> None:
    """Say how long the run will take, as `plan` does, where its rows can be counted."""
    with suppress(RefusedError, ResourceError):
        plan = best_plan(replace(asked, answers=Answers()))[1]
        length = run_length(plan)
        if length.step is not None:
            tell(Notice(f"predicted: {time_to_finish(plan, length)}"))
