"""The work of `roundpipe init`: questions, settings for a model on a machine, each with its reason, and the recipe."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import typer

from roundpipe_cli.choices import OBJECTIVES, PACKED_FORMATS, ExampleName, Objective, objectives_of
from roundpipe_cli.cli.init_rows import Looked, look_at_rows, parse_columns
from roundpipe_cli.cli.output import say, show_error
from roundpipe_cli.cli.recipes import write_new
from roundpipe_cli.costs.analytic import case_of
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import Hardware, parse_hardware
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU, describe_memory, host_memory, is_large_for_cpu
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import DType, TrainingSettings
from roundpipe_cli.data.rows import printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.heap import keep_heap
from roundpipe_cli.model.files.quantization import describe_repacking
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.fitting_recipe import fitting_recipe
from roundpipe_cli.planning.predict import Plan, best_plan
from roundpipe_cli.planning.question import HERE, ask, ask_again, hardware_of
from roundpipe_cli.planning.solve import Change, best_precision, changed, remedies
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.planning.what_if import summary_of
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe, load_text, resolve_path, values_as_yaml
from roundpipe_cli.recipe.schema import DEFAULT_LEARNING_RATES, Recipe, plain_data, trained_kind
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import counted, either, format_bytes, format_count

# Questions on a terminal.


def _check_data(answer: str, folder: Path) -> None:
    if (folder / named_path(answer)).exists():
        look_at_rows(answer, folder)
    elif _is_local_file(answer):
        say(f"note: {answer} is not there yet")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", answer):
        raise RefusedError("this is neither a file or folder here nor the id of a hub dataset", found=answer)
    else:
        say(f"note: {answer} is not here: it is taken for the id of a hub dataset")


def _check_new(answer: str, folder: Path) -> None:
    if Path(answer).exists():
        raise RefusedError(f"{answer} is there already and is not overwritten")


@dataclass(frozen=True)
class Question:
    """A question on a terminal where no flag answers it."""

    flag: str
    text: str
    default: str
    explanation: str
    """The answer to `?`."""
    check: Callable[[str, Path], object]
    """Takes the answer and the recipe's folder; refuses what could not be used."""


QUESTIONS = (
    Question(
        "model",
        "Model (hub id, local folder or .gguf file)",
        "Qwen/Qwen3-8B",
        "The model to train: a hub id such as Qwen/Qwen3-8B, a folder of safetensors, a .gguf file, or package:NAME. "
        "Its weights are not downloaded now. `roundpipe recipes ls` lists models with a recipe of their own.",
        lambda answer, folder: find_architecture(answer, resolve_path(answer, folder)),
    ),
    Question(
        "data",
        "Your rows (a file, or a hub id)",
        "data/train.jsonl",
        "A file (jsonl, json, csv, tsv, txt, parquet), a folder of them, or the id of a hub dataset. A row has "
        '"messages", or "prompt" and "completion", or "instruction" and "output", or "text"; a preference pair has '
        '"prompt", "chosen" and "rejected". The file may come later; '
        "`roundpipe data RECIPE` then shows what training sees.",
        _check_data,
    ),
    Question(
        "hardware",
        "Hardware (`here`, or for instance 2x3090,host_memory_gib=64)",
        HERE,
        "`here` is this machine. Another one is the number and name of its cards, then its memory: 1x4060ti-16gb, "
        "2x3090,host_memory_gib=64. The recipe's settings are chosen to fit it.",
        lambda answer, _: answer.lower() == HERE or parse_hardware(answer),
    ),
)


def ask_and_write(
    answers: dict[str, str], output: Path | None, *, method: str | None, objective: str | None, columns: str = ""
) -> None:
    """Write a recipe by the answers to `QUESTIONS`; those that are empty are asked.

    Args:
        columns: as of `parse_columns`; empty: found in the rows.

    Raises:
        RefusedError: an answer, or there is no terminal to ask on.
    """
    from roundpipe_cli.data.sources import count_dataset  # which loads multiprocessing

    missing = [question for question in QUESTIONS if not answers[question.flag]]
    folder = output.absolute().parent if output is not None else Path.cwd()
    try:
        for question in missing:
            answers[question.flag] = _ask(question, folder)
        for flag, value in answers.items():
            _check_text(f"--{flag}", value)
        path = output or Path(f"{_file_stem(answers['model'])}.yaml")
        if missing and path.exists():
            path = Path(_ask(_another_file(path), folder))
        say(f"choosing settings for {answers['model']} ...")
        if path.exists():
            raise RefusedError(f"{path} is there already and is not overwritten", hint="--output names another file")
        data, hardware, folder = answers["data"], answers["hardware"].strip(), path.absolute().parent
        looked = look_at_rows(data, folder, parse_columns(columns))
        if missing and looked.is_guess:
            looked = _agree_on_columns(looked, folder)
        chosen, why = choose_objective(objective, method, looked.example)
        rows = count_dataset(looked.spec, folder)
        num_rows = rows.num_rows if rows is not None else None
        machine = None if hardware.lower() == HERE else hardware
        choice = choose_settings(answers["model"], machine, path, num_rows, method=method, objective=chosen)
        choice = for_these_rows(choice, looked.spec)
        choice = replace(choice, reasons=(*choice.reasons, *filter(None, [why]), *looked.reasons))
        for reason in choice.reasons:
            say(reason)
        write_new(path, recipe_text(choice, looked.spec, path).encode())
        load_recipe(path)
    except (typer.Abort, RoundpipeError):
        if missing and sys.stdin.isatty():
            named = dict(answers, method=method, objective=objective, output=str(output or ""), columns=columns)
            given = (f"--{flag} {shlex.quote(value)}" for flag, value in named.items() if value)
            say(f"\nthe answers so far: roundpipe init {' '.join(given)}")
        raise
    say(f"wrote {path}")
    if _is_local_file(data) and not named_path(data).exists():
        say(f"put your rows into {data}: a JSON object a line, with messages, or prompt and completion")
    say(f"next: roundpipe {'finetune' if choice.plan.question.machine.is_here else 'plan'} {shlex.quote(str(path))}")


def _agree_on_columns(looked: Looked, folder: Path) -> Looked:
    """The columns as the user wants them, by a sample row before and after."""
    for line in looked.sample:
        say(line)
    if typer.confirm(f"{looked.use}?", default=True, err=True):
        return replace(looked, is_guess=False)
    usual = ",".join(f"{field}={name}" for field, name in looked.spec.columns.items())
    explanation = "Which column is what: prompt and completion, messages, or text, each as FIELD=COLUMN."

    def again(answer: str, folder: Path) -> Looked:
        return look_at_rows(looked.spec.path, folder, parse_columns(answer))

    return again(_ask(Question("columns", "Columns", usual, explanation, again), folder), folder)


# Settings: those of a plan, with its remedy where it needs one.

METHOD_ANSWERS: dict[str, Literal["lora", "full"]] = {"lora": "lora", "qlora": "lora", "full": "full"}
"""Answers to `--method` -> the recipe's method; `qlora` also packs the base weights in 4 bit."""
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
    """All values but the data's and the output's."""
    overrides: tuple[str, ...]
    """`key=value` of what else the recipe's text has: those of the remedy, for instance."""
    reasons: tuple[str, ...]
    plan: Plan
    """With rows that are full."""


def choose_objective(given: str | None, method: str | None, example: ExampleName | None) -> tuple[Objective, str]:
    """The objective for what rows hold (None: not known), and the reason where it is not the usual one.

    Raises:
        RefusedError: no training of this kind with such rows, or with this method.
    """
    if given is not None and given not in OBJECTIVES:
        raise RefusedError("unknown objective", where="--objective", found=given, expected=", ".join(OBJECTIVES))
    asked = next((name for name in OBJECTIVES if name == given), None)
    if asked and OBJECTIVES[asked].needs_teacher:
        what, hint = f"init writes no recipe for objective {asked}", "roundpipe recipes copy distill"
        raise RefusedError(what, where="--objective", found=asked, hint=hint)
    every = objectives_of(example or OBJECTIVES[asked or Recipe.objective].example)
    fitting = [name for name in every if method != "full" or not OBJECTIVES[name].needs_reference]
    objective = asked or (fitting or every)[0]
    kind, noun = OBJECTIVES[objective], OBJECTIVES[every[0]].rows.noun
    if objective not in every:
        what, hint = f"objective {objective} trains on {kind.rows.noun}", f"--objective {either(every)}"
        raise RefusedError(what, where="--objective", found=noun, hint=hint)
    if objective not in fitting:
        hint = "".join(f"--objective {name}, or " for name in fitting[:1]) + "--method lora"
        raise RefusedError(f"objective {objective} needs method lora", where="--method", found="full", hint=hint)
    if kind.loss is None:
        return objective, ""
    why = f"objective {objective}: {'as asked' if example is None else f'the rows are {noun}'}"
    if kind.needs_reference:
        why += "; the reference is the model without the adapters"
    elif asked is None and objective != every[0]:
        why += f"; {every[0]} needs method lora, as its reference is the model without adapters"
    return objective, f"{why}."


def choose_settings(
    model: str,
    hardware: str | Hardware | None,
    path: Path,
    num_rows: int | None = None,
    *,
    method: str | None = None,
    objective: Objective = Recipe.objective,
) -> Choice:
    """Settings for `model` on the machine `hardware`, in words or figures, or on this one.

    Args:
        num_rows: of the data; None: not known, as many as a step takes.
        method: one of `METHOD_ANSWERS`; None: all weights of a small model, adapters otherwise.

    Raises:
        RefusedError: no such model, hardware or method, or nothing of it fits.
    """
    if method is not None and method not in METHOD_ANSWERS:
        raise RefusedError("unknown method", where="--method", found=method, expected=", ".join(METHOD_ANSWERS))
    folder = path.absolute().parent
    architecture = find_architecture(model, resolve_path(model, folder))
    loaded = load_text("model: some/model\ndatasets: [{path: rows.jsonl}]\n", "recipe.yaml")
    loaded = replace(loaded, folder=folder, recipe=replace(loaded.recipe, model=model))
    machine = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    machine = machine or hardware_of(loaded.recipe, architecture)
    dtype = _dtype(machine)
    by_processor = hardware is None and is_large_for_cpu(machine, architecture.parameters)
    chosen, why_method = _method(architecture, machine, dtype, asked=method, objective=objective)
    length = min(SEQUENCE, architecture.max_position_embeddings or SEQUENCE)
    per_step, why_rows = _rows(length, machine, num_rows, least=1 + OBJECTIVES[objective].estimates_kl)
    pipeline = loaded.recipe.pipeline
    recipe = replace(
        loaded.recipe,
        method=chosen,
        objective=objective,
        load_in_4bit=method == "qlora",
        dtype=dtype,
        max_seq_length=length,
        gradient_accumulation_steps=per_step,
        pipeline=replace(pipeline, devices=("cpu", "cpu")) if by_processor else pipeline,
        hardware=hardware if isinstance(hardware, str) else None,
    )
    plan, change, advice = _planned(replace(loaded, recipe=recipe), machine, keeps_method=method is not None)
    why_change = [f"{change.what}; without it: {advice[0]}."] if change is not None else []
    kind = trained_kind(plan.question.given.recipe.method, objective)
    rate = f"learning_rate {DEFAULT_LEARNING_RATES[kind]:g}: the default for {kind}"
    reasons = (
        *filter(None, [_about_machine(plan), why_method, _about_published(plan)]),
        *why_change,
        *_about_plan(plan, why_rows, path),
        *advice[1:],
        *_about_devices(dtype, by_processor),
        f"{rate}; without a line it follows the method.",
    )
    return Choice(plan.question.given.recipe, change.overrides if change is not None else (), reasons, plan)


def _about_machine(plan: Plan) -> str:
    machine, model = plan.question.machine, plan.question.architecture
    has = f"{format_bytes(machine.host_memory_bytes)} of host memory"
    memory = describe_memory(host_memory()) if machine.is_here else has
    return f"{model.name}: {format_count(model.parameters)} parameters, on {machine.description} with {memory}."


def _about_plan(plan: Plan, why_rows: str, path: Path) -> Iterator[str]:
    question, verdict = plan.question, plan.verdict
    recipe, workers = question.given.recipe, question.num_workers * question.hardware.machines
    count = question.loaded.recipe.microbatches_per_step * question.settings.sequence_chunks
    yield f"max_seq_length {recipe.row_tokens}: longer rows are cut."
    per_step, shares = recipe.gradient_accumulation_steps, sorted({count // workers, -(-count // workers)})
    each = f", {' or '.join(map(str, shares))} for each of {workers} workers"
    yield (
        f"{question.choices[0]}. gradient_accumulation_steps {per_step}: {why_rows}{counted(per_step, 'row')} a step, "
        f"{counted(count, 'full microbatch')}{each * (workers > 1)}."
    )
    yield (
        f"It {'fits' if summary_of(plan).word == 'FITS' else 'is SLOW'}: "
        f"{format_bytes(verdict.device.total_bytes)} of a worker's memory, {format_bytes(verdict.host.total_bytes)} of "
        f"host memory, {plan.tokens_per_s:,.0f} tokens/s by `roundpipe plan {shlex.quote(str(path))}`."
    )


def for_these_rows(choice: Choice, data: DatasetSpec) -> Choice:
    """The choice with as many epochs as few rows need, and with what `finetune` would advise where workers wait."""
    from roundpipe_cli.train.prepare.steps import LEAST_UPDATES, enough_epochs
    from roundpipe_cli.train.run_length import forecast, rows_of_plan, run_length

    entry = replace(choice.recipe.datasets[0], path=data.path, columns=data.columns, encoding=data.encoding)

    def with_rows(plan: Plan, **changes: Any) -> Plan:
        loaded = plan.question.loaded
        loaded = replace(loaded, recipe=replace(loaded.recipe, datasets=(entry,), **changes))
        return replace(plan, question=replace(plan.question, loaded=loaded))

    plan, recipe, overrides, reasons = with_rows(choice.plan), choice.recipe, choice.overrides, list(choice.reasons)
    rows, question = rows_of_plan(plan), plan.question
    found = forecast(plan, run_length(plan, rows)).waiting
    if found is not None and found.overrides:
        better = changed(replace(question.given, recipe=recipe), found.overrides)
        if better.recipe.rows_per_step == recipe.rows_per_step:  # else an epoch has fewer updates
            plan = with_rows(best_plan(ask_again(choice.plan.question, better))[1])
            recipe, overrides = better.recipe, (*overrides, *found.overrides)
            reasons.append(f"{' '.join(found.overrides)}: else {found.text}.")
        else:
            reasons.append(f"Faster, with fewer updates an epoch: {found.describe()}.")
    updates, changes = run_length(with_rows(plan, packing=False), rows).steps, dict[str, Any]()
    if updates is not None and updates < LEAST_UPDATES:
        changes["num_train_epochs"] = epochs = enough_epochs(updates)
        reasons.append(
            f"num_train_epochs {epochs}: an epoch has {counted(updates, 'update')}, and a run of fewer than "
            f"{LEAST_UPDATES} hardly changes the answers; without the line it is 1."
        )
    length = run_length(with_rows(plan, **changes), rows)
    if length.is_packed and (length.steps or 0) < LEAST_UPDATES * changes.get("num_train_epochs", 1):
        changes["packing"] = False
        reasons.append("packing false: packed, an epoch would have fewer updates still.")
    plan = with_rows(plan, **changes)
    length = run_length(plan, rows)
    if length.step is not None:
        reasons.append(f"Time to finish: {forecast(plan, length).text}.")
    overrides += tuple(f"{key}={str(value).lower()}" for key, value in changes.items())
    return replace(choice, recipe=replace(recipe, **changes), overrides=overrides, reasons=tuple(reasons))


def _planned(loaded: LoadedRecipe, machine: Hardware, keeps_method: bool) -> tuple[Plan, Change | None, list[str]]:
    """The plan, with the remedy where there is one that keeps the model, and the method if that is asked for; why that
    was needed, and what else helps.

    Raises:
        RefusedError: it does not fit, with what fits.
    """
    keep_heap()
    question = ask(loaded, machine, answers=Answers())
    plan = best_plan(question)[1]
    summary, found = summary_of(plan), remedies(plan)
    why = summary.reasons[0] if summary.reasons else ""
    left_to_user: tuple[str, ...] = ("model=", "gradient_accumulation_steps=")  # as many as the data have rows for
    left_to_user += ("method=",) if keeps_method else ()
    own = next((change for change in found if not change.overrides[0].startswith(left_to_user)), None)
    if own is None and plan.verdict.fits and loaded.recipe.method == "lora" and not loaded.recipe.load_in_4bit:
        precision = best_precision(question, plan)
        if precision is not None and precision.overrides:
            own, takes = precision, format_bytes(plan.verdict.host.total_bytes)
            has = format_bytes(question.hardware.host_memory_bytes)
            why = f"{plan.tokens_per_s:,.0f} tokens/s, {takes} of {has} of host memory"
    others = [change for change in found if change is not own]
    if own is None and not plan.verdict.fits:
        fitting = fitting_recipe(question, others[0] if others else None)
        hints = [change.what for change in others] or ["no smaller model that the tool knows fits either"]
        hints += [f"this recipe of the tool fits: {' '.join(fitting)}"] if fitting is not None else []
        name = question.architecture.name
        raise RefusedError(f"{name} does not fit {machine.description}", found=why, hint="; ".join(hints))
    if own is not None:
        plan = best_plan(ask_again(question, changed(loaded, own.overrides)))[1]
    return plan, own, [why, *(f"Faster: {change.what}." for change in others)]


def _dtype(machine: Hardware) -> DType:
    device = machine.devices[0]
    if device.is_cpu:
        return "bfloat16" if device.fp32_accumulate_flops_per_s > device.float32_flops_per_s else "float32"
    return "bfloat16" if all(one.has_bfloat16 for one in machine.devices) else "float16"


def _about_published(plan: Plan) -> str | None:
    stored, packed_as = plan.question.architecture.stored_as, plan.question.settings.packed_as
    if stored is None or packed_as is None:
        return None
    if packed_as != stored:
        return f"{describe_repacking(stored, packed_as)}."
    return f"The frozen weights stay in {PACKED_FORMATS[stored].label}, as published."


def _about_devices(dtype: DType, by_processor: bool) -> Iterator[str]:
    if by_processor:
        yield (
            f"pipeline.devices [cpu, cpu]: there is no GPU here, and above {format_count(MAX_PARAMETERS_ON_CPU)} "
            "parameters `finetune` trains on the processor only where the recipe says so."
        )
    if dtype != "bfloat16":
        slow = "is slower than float32 on this processor" if dtype == "float32" else "is not there on all of the GPUs"
        yield f"dtype {dtype}: bfloat16 {slow}."


def _method(
    architecture: Architecture, machine: Hardware, dtype: DType, *, asked: str | None, objective: Objective
) -> tuple[Literal["lora", "full"], str]:
    if asked is not None or OBJECTIVES[objective].needs_reference:
        return METHOD_ANSWERS[asked or "lora"], f"method {asked}: as asked." if asked else ""
    settings = TrainingSettings(SEQUENCE, num_microbatches=1, method="full", dtype=dtype)
    full = judge_coarsest(case_of(architecture, settings, machine))
    need = f"all weights would need {format_bytes(full.host.total_bytes)} of host memory"
    if full.fits and architecture.parameters <= MAX_FULL_PARAMETERS:
        return "full", f"method full: {need.replace('would need', 'need')}, and a model this small gains from it."
    fits = "which fits too: method=full" if full.fits else "which does not fit"
    return "lora", f"method lora: adapters; {need}, {fits}."


def _rows(length: int, machine: Hardware, num_rows: int | None, *, least: int) -> tuple[int, str]:
    """Rows of a step, `least` or more, and the reason where the data have few."""
    rows, workers = max(1, min(ROWS_PER_STEP, BUSY_TOKENS // length)), len(machine.devices) * machine.machines
    per_step = max(ROWS_PER_STEP, MICROBATCHES_PER_WORKER * workers * rows)
    if num_rows is None or num_rows >= LEAST_STEPS * per_step:
        return per_step, ""
    few = max(machine.machines, least, num_rows // LEAST_STEPS)
    return few, f"the data have only {counted(num_rows, 'row')}, for {counted(-(-num_rows // few), 'step')} an epoch; "


# The recipe.


def recipe_text(choice: Choice, data: DatasetSpec, path: Path) -> str:
    """The recipe: a header with the reasons, then the keys."""
    recipe, plain, values = choice.recipe, plain_data(choice.recipe), dict[str, Any]()
    header = [f"# Written by `roundpipe init` for {choice.plan.question.machine.description}.", "#"]
    header += [f"#   roundpipe finetune {shlex.quote(str(path))}", "#"]
    for reason in choice.reasons:
        header += textwrap.wrap(reason, 116, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
    keys = {"objective": recipe.scores_answers, "load_in_4bit": recipe.load_in_4bit}
    usual = ("datasets", "max_seq_length", "gradient_accumulation_steps")
    others = [override.partition("=")[0] for override in choice.overrides]
    keys |= dict.fromkeys([*(key for key in others if key not in usual), *usual], True)
    keys |= {"dtype": recipe.dtype != "bfloat16", "output_dir": True}
    keys |= {"pipeline.devices": recipe.pipeline.devices != "auto", "hardware": recipe.hardware is not None}
    for key in ("model", "method", *(key for key, is_written in keys.items() if is_written)):
        section, _, inner = key.partition(".")
        value = plain[section]
        values[section] = {**values.get(section, {}), inner: value[inner]} if inner else value
    entry = {"path": data.path, "columns": dict(data.columns), "encoding": data.encoding}
    entry = {key: value for key, value in entry.items() if value not in ({}, DatasetSpec.encoding)}
    values |= {"datasets": [entry], "output_dir": f"outputs/{_file_stem(path.stem)}"}
    text = values_as_yaml(values, width=1 << 20)
    text = re.sub(r"^(datasets|max_seq_length|output_dir|pipeline|hardware):", r"\n\g<0>", text, flags=re.MULTILINE)
    text = re.sub(r"\ngradient_accumulation_steps: .*", r"\g<0>  # rows of a step", text)
    text = re.sub(r"\nhardware: .*", r"\g<0>  # what `plan` assumes; `finetune` takes the machine it runs on", text)
    return "\n".join([*map(printable, header), "", text])


def _check_text(flag: str, value: str) -> None:
    if not value.isprintable():  # bytes that are no UTF-8 are lone surrogates here
        found, expected = value.encode("unicode_escape").decode("ascii")[:200], "text in UTF-8, on one line"
        raise RefusedError("a recipe cannot hold this text", where=flag, found=found, expected=expected)


def _another_file(path: Path) -> Question:
    free = next(name for count in itertools.count(2) if not (name := path.with_stem(f"{path.stem}-{count}")).exists())
    explanation = "The recipe is written to a new file; what is there already is not touched."
    return Question("output", f"{path} is there already. Recipe to write", str(free), explanation, _check_new)


def _ask(question: Question, folder: Path) -> str:
    """The answer to a question, asked again until it can be used; refuses to ask where there is no terminal."""
    if not sys.stdin.isatty():
        raise RefusedError(
            f"init needs to know the {question.flag}, and there is no terminal to ask on",
            expected="--model, --data and --hardware",
            hint=f"roundpipe init --model Qwen/Qwen3-8B --data data/train.jsonl --hardware {HERE}",
        )
    while True:
        answer = str(typer.prompt(question.text, default=question.default, err=True)).strip()
        if answer == "?":
            say(f"note: {question.explanation}")
            continue
        try:
            _check_text("the answer", answer)
            question.check(answer, folder)
        except RefusedError as error:
            show_error(error)
        else:
            return answer


def _file_stem(model: str) -> str:
    """`Qwen/Qwen3-8B -> qwen3-8b`."""
    last = model.rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip(".-") or "recipe"


def _is_local_file(data: str) -> bool:
    return data.startswith((".", "/", "~")) or bool(re.search(r"\.(jsonl?|csv|tsv|parquet)(\.gz)?$", data))
