"""The length of a run before it begins: its steps, the tokens of its rows, and the time that they take. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.data.batching import BatchSampler
from roundpipe_cli.data.files import RowCount
from roundpipe_cli.data.lengths import TokenCounter, longest_row, sample_lengths, token_counter
from roundpipe_cli.data.settings import spec_of
from roundpipe_cli.data.sources import count_dataset
from roundpipe_cli.data.tokenized import Packer, PackingChoice, RowMix, count_sequences, decide_packing, held_out_count
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.events import Tell, tell_notices
from roundpipe_cli.planning.admission import packing_obstacle
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.predict import Plan, best_plan, reference_s, simulate_step
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.train.checkpoint.output_dir import list_checkpoints
from roundpipe_cli.train.prepare.steps import (
    Lengths,
    UsualStep,
    WaitingRemedy,
    find_waiting,
    mix_of,
    sampler_of,
    usual_step,
)
from roundpipe_cli.units import counted, format_seconds

EXAMPLE_ROWS = 10_000
"""Number of rows whose time is shown where a run's own are not known."""
MOST_ROWS = 16_384
"""Rows whose microbatches are made; of more, as many, and what they make is scaled."""
BYTES_PER_TOKEN = 4
"""Bytes of text a token: usual for English and code (assumed); other languages have fewer, so longer runs."""
MOST_OFF = 1.5
"""An estimate of a row's tokens is taken to be within so many times the truth; where `packing: auto` would answer
differently within that, the plan leaves the answer to `roundpipe data`, which counts."""
UNDECIDED = "packed or not as `roundpipe data` says"


@dataclass(frozen=True, slots=True)
class KnownRows:
    """The rows that a recipe names, as far as their files say before a tokenizer has read them."""

    unknown: str = ""
    """Why they cannot be counted, or that there are none; empty: they are counted."""
    is_exact: bool = False
    total: int = 0
    """Rows with those that are held out."""
    per_epoch: int = 0
    mix: RowMix = field(default_factory=lambda: RowMix((), (), 0, False))
    """Epochs of at most `MOST_ROWS` rows."""
    lengths: Lengths | None = None
    """Estimated tokens of each row of `mix`; None: not known."""

    @property
    def tokens(self) -> float | None:
        """Estimated mean of an epoch."""
        return None if self.lengths is None else float(self.lengths[self.mix.order(0)].mean())

    def packed(self, recipe: Recipe, times: float = 1.0) -> int:
        """Sequences of an epoch where rows of so many times the estimated tokens are packed."""
        if self.lengths is None:
            return self.per_epoch
        lengths = np.clip(np.rint(times * self.lengths), 1, recipe.row_tokens).astype(np.int64)
        packer = Packer(lengths, recipe.row_tokens, recipe.seed, recipe.shuffle)
        return math.ceil(count_sequences(self.mix, packer) * self.per_epoch / self.mix.rows_per_epoch)


def find_rows(loaded: LoadedRecipe, counter: TokenCounter | None = None) -> KnownRows:
    """The rows of a recipe; `counter`: None: by the bytes of their texts."""
    recipe, counter = loaded.recipe, counter or token_counter(None, None)
    specs = [spec_of(entry, recipe.objective_kind.example) for entry in recipe.datasets]
    counts = list[RowCount]()
    for spec in specs:
        if (count := count_dataset(spec, loaded.folder)) is None:
            return KnownRows(f"the rows of {spec.path} cannot be counted here")
        if count.is_exact and not count.num_rows:
            return KnownRows(f"{spec.path} has no rows, which `finetune` refuses", is_exact=True)
        counts.append(count)
    total, is_exact = sum(count.num_rows for count in counts), all(count.is_exact for count in counts)
    share = 1 - held_out_count(total, recipe.val_set_size) / max(1, total)
    sizes = [round(count.num_rows * share) for count in counts]
    part = min(1.0, MOST_ROWS / max(1, sum(sizes)))
    mix, lengths = mix_of(recipe, [math.ceil(part * size) for size in sizes]), list[Lengths]()
    for spec, count, num_rows in zip(specs, counts, mix.source_rows, strict=True):
        mean = round(count.num_bytes / BYTES_PER_TOKEN / max(1, count.num_rows))  # of a cached hub dataset
        sample = np.array(sample_lengths(spec, loaded.folder, counter) or [mean], dtype=np.int64)
        lengths.append(np.resize(np.minimum(sample, recipe.row_tokens), num_rows))
    known, per_epoch = np.concatenate(lengths), mix_of(recipe, sizes).rows_per_epoch
    return KnownRows("", is_exact, total, per_epoch, mix, known if per_epoch and known.all() else None)


def with_estimated_length(loaded: LoadedRecipe) -> LoadedRecipe:
    """See `with_row_tokens`; as it is where it says a number, or rows cannot be read here."""
    recipe, tokens = loaded.recipe, 1
    if recipe.max_seq_length != "auto":
        return loaded
    found = find_config(recipe.model, resolve_path(recipe.model, loaded.folder), recipe.revision)
    counter = token_counter(found.folder, found.config.get("chat_template"))
    for entry in (*recipe.datasets, *recipe.eval_datasets):
        longest = longest_row(spec_of(entry, recipe.objective_kind.example), loaded.folder, counter)
        if longest is None:
            return loaded
        tokens = max(tokens, longest)
    return loaded.with_row_tokens(tokens, "about the longest row; `roundpipe data` counts its tokens")


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


def length_of(loaded: LoadedRecipe, obstacle: str | None = None, rows: KnownRows | None = None) -> RunLength:
    """The length of a recipe's run, as far as the recipe and the files that it names say.

    Args:
        obstacle: why the model or the recipe cannot train on packed rows; None where it can.
        rows: None: found here.
    """
    recipe, rows = loaded.recipe, rows or find_rows(loaded)
    if rows.unknown and rows.is_exact:  # there are none
        return RunLength(None, rows.unknown)
    is_packed, how, line = _packing(recipe, rows, obstacle)
    sequences, step = rows.packed(recipe) if is_packed else rows.per_epoch, None
    if rows.lengths is not None:
        decided = replace(recipe, packing=is_packed) if recipe.packing == "auto" else recipe
        with suppress(RefusedError):  # fewer rows than a step takes
            sampler = sampler_of(decided, rows.mix, rows.lengths)
            step = usual_step(sampler, math.ceil(sequences / recipe.rows_per_step))
    if step is None and not is_packed and rows.is_exact and rows.per_epoch < recipe.rows_per_step:
        how += f"; fewer rows than the {recipe.rows_per_step} of a step, which `finetune` refuses"
    if recipe.max_steps is not None:
        return RunLength(recipe.max_steps, f"max_steps{how}", is_packed, line, step, sequences)
    if rows.unknown:
        return RunLength(None, rows.unknown, is_packed, line)
    why = f"{'' if rows.is_exact else 'about '}{counted(rows.total, 'row')}"
    why += "" if rows.tokens is None else f" of about {max(1, round(rows.tokens))} tokens"
    steps = math.ceil(sequences / recipe.rows_per_step) * recipe.num_train_epochs
    return RunLength(steps, why + how, is_packed, line, step, sequences)


def _packing(recipe: Recipe, rows: KnownRows, obstacle: str | None) -> tuple[bool, str, str]:
    """Whether rows are packed, that as the end of a phrase, a line if we are to choose: by the rule of `data` and a
    run, where it says the same of all tokens that the rows may have."""
    tokens = rows.tokens
    if recipe.packing != "auto":
        words = ", packed" if tokens is not None else ", before packing"
        return recipe.packs, words if recipe.packs else "", ""
    answers = [PackingChoice(False, obstacle)] if tokens is None and obstacle is not None else []
    if tokens is not None:
        for times in (1, 1 / MOST_OFF, MOST_OFF):
            count = lambda times=times: rows.packed(recipe, times)  # noqa: E731
            answers.append(decide_packing(recipe, times * tokens, rows.per_epoch, count, obstacle=obstacle))
    if len({answer.packs for answer in answers}) == 1:
        packs, line = answers[0].packs, answers[0].describe() + ("" if tokens is None else "; tokens are estimated")
        return packs, f", {'packed' if packs else 'not packed'}", line
    known = "the tokens of a row are not known here" if tokens is None else f"rows have about {tokens:,.0f} tokens"
    return False, f", {UNDECIDED}", f"packing (auto): {UNDECIDED}: {known}"


def rows_of_plan(answer: Plan) -> KnownRows:
    """The rows of the run that is planned, by its model's tokenizer where that is here."""
    found = answer.question.found
    return find_rows(answer.question.loaded, token_counter(found.folder, found.config.get("chat_template")))


def run_length(answer: Plan, rows: KnownRows | None = None) -> RunLength:
    """The length of the run that is planned; `rows`: None: found here."""
    question = answer.question
    obstacle = packing_obstacle(question.found, question.loaded.recipe)
    return length_of(question.loaded, obstacle, rows or rows_of_plan(answer))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The time that a planned run takes."""

    text: str
    """`11 s for 10 steps (120 rows of about 61 tokens, not packed)`; a full step's time where rows are not known."""
    step_s: float
    """Seconds of a usual step."""
    waiting: WaitingRemedy | None = None
    """Workers that wait since a usual step has few microbatches, in the words of `finetune`."""


def forecast(answer: Plan, length: RunLength) -> Forecast:
    """The time of a run of this length by its plan."""
    question, recipe, steps, step = answer.question, answer.question.loaded.recipe, length.steps, length.step
    if steps is None:
        each_s = answer.step_s * recipe.num_train_epochs * EXAMPLE_ROWS / recipe.rows_per_step
        text = f"{format_seconds(each_s)} for every {EXAMPLE_ROWS:,} full rows ({length.why})"
        return Forecast(text, answer.step_s)
    for_steps = f"for {counted(steps, 'step')} ({length.why})"
    if step is None:
        full = "" if length.is_packed else ", if every row is full"
        return Forecast(f"{format_seconds(steps * answer.step_s)} {for_steps}{full}", answer.step_s)
    step_s, bubble = _usual_figures(answer, step)
    workers, sequences = question.num_workers * question.hardware.machines, length.num_sequences
    waiting = find_waiting(recipe, workers, step.num_microbatches, bubble, num_sequences=sequences)
    least, most = (format_seconds(steps * seconds) for seconds in answer.band.around(step_s))
    text = f"{format_seconds(steps * step_s)} ({least} to {most}) {for_steps}, each {step.tokens:,.0f} tokens in "
    text += counted(step.num_microbatches, "microbatch")
    return Forecast(text if waiting is None else f"{text}, for which workers wait {bubble:.0%}", step_s, waiting)


def left_to_resume(answer: Plan, length: RunLength) -> tuple[Path, int] | None:
    """The newest checkpoint in the output directory, and the steps that `--resume` would take from there; None:
    there is none, or it is at the run's end."""
    with suppress(RefusedError, ResourceError):  # `finetune` says why the folder cannot be read
        for step, folder in list_checkpoints(named_path(answer.question.loaded.recipe.output_dir))[:1]:
            if step < (length.steps or 0):
                return folder, (length.steps or 0) - step
    return None


def tell_forecast(
    ask: Callable[[], PlanRequest], recipe: Recipe, sampler: BatchSampler, num_steps: int, *, machines: int, tell: Tell
) -> None:
    """Say how long the last `num_steps` of a run will take, as `plan` does, by its rows, and how workers wait less.

    Args:
        machines: as this one, which share the rows of a step. The rate between them is not known.
    """
    if num_steps < 1:
        return
    with suppress(RefusedError, ResourceError):
        plan = best_plan(replace(ask(), answers=Answers()))[1]
        hardware = replace(plan.question.hardware, machines=machines, network_bytes_per_s=math.inf)
        plan = replace(plan, question=replace(plan.question, hardware=hardware))
        sequences, step = sampler.num_sequences(0), usual_step(sampler, num_steps)
        why = f"{counted(sequences, 'packed sequence' if recipe.packs else 'row')} an epoch"
        why += f", on {machines} machines, without the exchange between them" if machines > 1 else ""
        found = forecast(plan, RunLength(num_steps, why, recipe.packs, step=step, num_sequences=sequences))
        advice = None if found.waiting is None else found.waiting.describe()
        tell_notices(tell, f"predicted: {found.text}", advice)


def _usual_figures(answer: Plan, step: UsualStep) -> tuple[float, float]:
    """Seconds of such a step with the plan's stages, and the share of it in which workers wait."""
    question = answer.question
    count = -(-step.num_microbatches // question.hardware.machines) * question.settings.sequence_chunks
    own = replace(question.settings, max_seq_length=step.length, micro_batch_size=step.rows, num_microbatches=count)
    link = question.costs.link_bytes_per_s  # of the disk, where weights are read from there
    costs = replace(analytic_costs(question.architecture, own, question.hardware), link_bytes_per_s=link)
    asked = replace(question, settings=own, costs=costs)
    per_round = answer.cut.microbatches_per_round and min(answer.microbatches_per_round, count)
    cut = replace(answer.cut, microbatches_per_round=per_round)
    simulated = simulate_step(asked, cut)
    return simulated.step_s + reference_s(asked, cut), simulated.bubble_ratio
