"""The question to a planner: a recipe's model and settings, and the cards of a machine. No torch."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from roundpipe_cli.costs.analytic import Case, analytic_costs, case_of, with_gains
from roundpipe_cli.costs.find_model import FoundConfig, built_architecture, find_config
from roundpipe_cli.costs.hardware import ASSUMED_DISK_BYTES_PER_S, Device, Hardware, parse_hardware, part_of
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU, cpu_devices, slow_in_16_bit, this_machine
from roundpipe_cli.costs.memory import (
    ALLOCATOR_VARIABLES,
    GAPS,
    INPUTS_SHARE,
    frozen_bytes,
    host_need,
    usable_host_bytes,
    without_gaps,
)
from roundpipe_cli.costs.models import (
    MAX_COUNT_ERROR,
    Architecture,
    quantization_settings,
    stored_as,
    with_stored_count,
)
from roundpipe_cli.costs.nvidia_smi import require_memory, visible_gpus
from roundpipe_cli.costs.settings import TrainingSettings, head_chunk_tokens
from roundpipe_cli.errors import ContradictionError, RefusedError
from roundpipe_cli.model.files.untrusted import INDEX_NAME, are_equal, file_tensors, find_shards, read_json
from roundpipe_cli.planning.admission import (
    check_configuration,
    check_model,
    check_shareable,
    chunk_obstacle,
    has_weights,
    holds_weights,
)
from roundpipe_cli.planning.answers import Answers, answered
from roundpipe_cli.planning.chunk_count import CHUNKS_KEY, best_number, chunk_counts, with_chunks
from roundpipe_cli.planning.token_budget import budgets, fastest, for_processors
from roundpipe_cli.planning.unpacking import Unpacking, choose_unpacking
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.check import contradictions
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import LENGTH_KEY, Recipe
from roundpipe_cli.schedule.timeline import Timeline, busy_s
from roundpipe_cli.sizes import check_sizes
from roundpipe_cli.units import counted, format_bytes, format_count

# Number of parameters of a model, by `plan`'s own count, by the model itself or by its files. No torch.

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLAG = "tie_word_embeddings"
HEAD = re.compile(r"(?<!mtp\.)\b(lm_head|embed_out|output_projection|lm_loss)\.(?!.*bias$)")
EMBEDDING = re.compile(
    r"\b(embed_tokens|tokens_embed|embed_in|word_embeddings?|tok_embeddings|wte|embeddings)\.weight$"
)
"""Names that the LM head and the embedding have in the files of language models."""

Build = Callable[[FoundConfig], Mapping[str, Any] | None]
"""Counts a model by building it without weights (`model/meta_counts.py`); None: it could not be built."""


def counted_architecture(found: FoundConfig, build: Build | None = None) -> Architecture:
    """The model's architecture, with as many parameters as the model has, or as its files hold.

    Args:
        build: for a configuration that is not counted exactly here.

    Raises:
        RefusedError: a needed figure is missing or impossible, or `build` refuses the model.
    """
    if build is not None and found.needs_building:
        check_sizes(found.config, f"{found.name} ({found.source})")
        counts = build(found)
        if counts is not None:
            return _as_built(found, counts)
    architecture = found.architecture()
    if architecture.tied and _has_own_head(found):
        architecture = replace(architecture, tied=False)
    in_header = found.config.get("stored_parameters")
    if isinstance(in_header, int):
        return with_stored_count(architecture, in_header, found.source)
    count, source = _stored_count(found, architecture.tied)
    return _noting_no_weights(found, with_stored_count(architecture, count, source))


def _has_own_head(found: FoundConfig) -> bool:
    """Whether the files hold an LM head beside the embedding, with other values as far as they are here.

    `finetune` then uses both, whatever the configuration says (`model/stored/untied.py`).
    """
    if found.folder is None:
        return False
    if not holds_weights(found):
        try:
            names = read_json(found.folder / INDEX_NAME)["weight_map"]
        except (RefusedError, KeyError):
            return False
        return all(any(pattern.search(str(name)) for name in names) for pattern in (HEAD, EMBEDDING))
    places = file_tensors(find_shards(found.folder))
    heads, tables = ([places[name] for name in places if pattern.search(name)] for pattern in (HEAD, EMBEDDING))
    return bool(heads and tables) and not any(are_equal(head, table) for head in heads for table in tables)


def _as_built(found: FoundConfig, counts: Mapping[str, Any]) -> Architecture:
    """The model's own count; a notice says so where the files hold another number."""
    how = f"{found.source}; parameters counted on the model itself, built without weights"
    if counts["shared"] and _has_own_head(found):
        counts = {**counts, "parameters": counts["parameters"] + counts["shared"], "shared": 0}
    architecture = built_architecture(counts, name=found.name, source=how)
    architecture = replace(architecture, stored_as=stored_as(found.config))
    text = found.config.get("text_config")
    says_tied = FLAG in found.config or (isinstance(text, dict) and FLAG in text)
    names_weights = found.folder is not None and (holds_weights(found) or (found.folder / INDEX_NAME).is_file())
    if counts["shared"] and not says_tied and not names_weights:
        note = (
            f"note: the LM head is counted as the embedding, as transformers takes it where config.json says nothing; "
            f"one that the files hold beside it adds {format_count(counts['shared'])} parameters"
        )
        architecture = replace(architecture, notes=(*architecture.notes, note))
    count, source = _stored_count(found, architecture.tied)
    if count is not None and abs(architecture.parameters / count - 1) > MAX_COUNT_ERROR:
        held, own = format_count(count), format_count(architecture.parameters)
        note = f"note: {held} parameters by {source}, {own} in the model that transformers builds, which is planned for"
        architecture = replace(architecture, notes=(*architecture.notes, note))
    return _noting_no_weights(found, architecture)


def _noting_no_weights(found: FoundConfig, architecture: Architecture) -> Architecture:
    if not found.is_local or found.folder is None or quantization_settings(found.config) or has_weights(found.folder):
        return architecture
    note = f"note: {found.folder} holds no weights; `finetune` needs *.safetensors there"
    return replace(architecture, notes=(*architecture.notes, note))


def _stored_count(found: FoundConfig, tied: bool) -> tuple[int | None, str]:
    """Parameters in the model's files, or None, and the name of the source."""
    if found.folder is None or quantization_settings(found.config):
        return None, ""
    if holds_weights(found):
        places = file_tensors(find_shards(found.folder))
        # some files hold a shared matrix under both names
        count = sum(math.prod(place.shape) for name, place in places.items() if not (tied and HEAD.search(name)))
        if not count:
            raise RefusedError(
                "the model's files hold no weights",
                where=str(found.folder),
                found="0 numbers in their headers",
                expected="the weights of the model in *.safetensors",
                hint="they may have been cut off: fetch or copy the model again",
            )
        return count, "the headers of its weights"
    return _count_of_index(found.folder, found.config), INDEX_NAME


def _count_of_index(folder: Path, config: dict[str, Any]) -> int | None:
    """Parameters by the index of weights that are not here; None where it has no total."""
    try:
        metadata = read_json(folder / INDEX_NAME).get("metadata")
    except RefusedError:
        return None
    figures = metadata if isinstance(metadata, dict) else {}
    count, size = figures.get("total_parameters"), figures.get("total_size")
    dtype_bytes = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
    if isinstance(count, int) and count > 0:
        return count
    return round(size / dtype_bytes) if isinstance(size, (int, float)) and size > 0 and dtype_bytes else None


THIS_MACHINE = "this machine"
HERE = "here"
"""The word for this machine where another one may be named."""


@dataclass(frozen=True, slots=True)
class PlanRequest(Case):
    """A recipe's model and settings on a machine, to be planned."""

    loaded: LoadedRecipe
    given: LoadedRecipe
    """The recipe as it was asked about: `loaded`, with `auto` where a number was decided."""
    found: FoundConfig
    """The model's configuration."""
    machine: Hardware
    """The machine as it was found: `hardware` without the notes on what was decided for it."""
    reads_disk: bool = False
    """Weights are read from the disk again in every round."""
    machine_source: str = ""
    """Who named the machine, as a text for the user."""
    choices: tuple[str, ...] = ()
    """A line for each key whose value is `auto`: what it became."""
    unpacking: Unpacking | None = None
    """How packed weights are unpacked; None: there are none."""
    answers: Answers | None = field(default=None, compare=False)
    """Answers to earlier questions; None: all is worked out anew."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step on all machines."""
        return int(self.loaded.recipe.microbatches_per_step * self.settings.tokens_of_sequences)

    @property
    def is_for_lack_of_gpus(self) -> bool:
        """The plan is for the CPU because no machine was named and there is no GPU here."""
        is_open = self.machine_source == THIS_MACHINE and self.loaded.recipe.pipeline.devices == "auto"
        return is_open and not self.gpus

    @property
    def lists_devices(self) -> bool:
        """Whether the devices are those that the recipe lists, so that a run uses all of them."""
        return self.machine_source == THIS_MACHINE and not isinstance(self.loaded.recipe.pipeline.devices, str)


USUAL_TEACHER_TOKENS = 64
"""Kept tokens of a teacher, as the commands of all pages ask for: `plan` needs no scores. More take little memory."""
ENOUGH_PER_WORKER = 4
"""Microbatches of a step for each worker that keep all of them busy."""


def rows_that_keep_busy(question: PlanRequest) -> int | None:
    """Rows of a step that has `ENOUGH_PER_WORKER` microbatches for each worker; None where one has as many already."""
    settings, recipe = question.settings, question.loaded.recipe
    enough = ENOUGH_PER_WORKER * question.num_workers
    if question.num_workers == 1 or settings.sequence_chunks > 1 or settings.num_microbatches >= enough:
        return None
    rows = enough * settings.micro_batch_size * question.hardware.machines
    return math.ceil(rows / recipe.micro_batch_size) * recipe.micro_batch_size


def settings_of(recipe: Recipe, architecture: Architecture) -> TrainingSettings:
    """The recipe's values that decide costs and memory, for a model."""
    targets = recipe.lora.target_modules
    return TrainingSettings(
        max_seq_length=recipe.row_tokens,
        micro_batch_size=recipe.rows_per_microbatch,
        num_microbatches=recipe.microbatches_per_step * recipe.pipeline.num_chunks,
        sequences_per_row=len(recipe.objective_kind.rows.sides),
        scores_answers=recipe.scores_answers,
        teacher_tokens=USUAL_TEACHER_TOKENS if recipe.objective_kind.needs_teacher else 0,
        counts_tokens=recipe.token_budget is not None,
        sequence_chunks=recipe.pipeline.num_chunks,
        method=recipe.method,
        lora_r=recipe.lora.r,
        expert_r=None if recipe.lora.expert_r == "auto" else recipe.lora.expert_r,
        lora_dropout=recipe.lora.dropout,
        lora_targets=None if targets == "all-linear" else (targets,) if isinstance(targets, str) else targets,
        dtype=recipe.dtype,
        float16_accumulation=recipe.float16_accumulation,
        deterministic=recipe.deterministic,
        packed_as=recipe.packed_from(architecture.stored_as),
        recompute=recipe.pipeline.recompute,
        fused=recipe.kernels == "auto",
        optimizer=recipe.optim,
        new_tokens=len(recipe.add_tokens),
        has_momentum=recipe.sgd_momentum > 0,
        head_chunk_tokens=head_chunk_tokens(recipe.head_chunk_tokens, architecture.vocab_size),
        mlp_chunk_tokens=recipe.mlp_chunk_tokens,
        save_total_limit=recipe.save_total_limit,
        weight_cache_bytes=0 if recipe.pipeline.weight_cache == "auto" else recipe.pipeline.weight_cache,
        weights_on_disk=recipe.weights == "mmap",
    )


def ask(
    loaded: LoadedRecipe,
    hardware: str | Hardware | None = None,
    *,
    here: bool = False,
    build: Build | None = None,
    found: FoundConfig | None = None,
    answers: Answers | None = None,
) -> PlanRequest:
    """Find the model's figures and the machine.

    Args:
        hardware: in words (`here` is one) or figures; None: what the recipe's `hardware` says, or else its devices on
            this machine.
        here: leave the recipe's `hardware` out.
        build: counts models that are not counted exactly here.
        found: the model's configuration, where its files were read and checked before.
        answers: see `PlanRequest`.

    Raises:
        RefusedError: no such model or hardware.
    """
    recipe = loaded.recipe
    if isinstance(hardware, str) and hardware.strip().lower() == HERE:
        hardware, here = None, True
    if found is None:
        found = find_config(recipe.model, resolve_path(recipe.model, loaded.folder), recipe.revision)
        check_model(found, recipe)
    else:
        check_configuration(found, recipe)
    if recipe.max_seq_length == "auto" and loaded.length_note is None:
        why = "assumed for auto: `finetune` takes the longest row of the data"
        loaded = replace(loaded, length_note=f"{LENGTH_KEY}={recipe.row_tokens}: {why}")
    architecture = counted_architecture(found, build).with_tokens(len(recipe.add_tokens))
    source = THIS_MACHINE if hardware is None else "as --hardware says"
    if hardware is None and recipe.hardware is not None and not here:
        hardware = parse_hardware(recipe.hardware, where=f"hardware: {recipe.hardware}")
        source = "the recipe's `hardware`"
    elif isinstance(hardware, str):
        hardware = parse_hardware(hardware)
    machine = hardware or hardware_of(recipe, architecture)
    return _decided(loaded, found, architecture, machine, source=source, answers=answers)


def ask_again(question: PlanRequest, loaded: LoadedRecipe) -> PlanRequest:
    """The question for another recipe of the same model and machine, which are not looked for again.

    Raises:
        RefusedError: the recipe asks for what this model cannot do, or for what does not go together.
    """
    return question if loaded.recipe in (question.given.recipe, question.loaded.recipe) else ask_anew(question, loaded)


def ask_anew(question: PlanRequest, loaded: LoadedRecipe) -> PlanRequest:
    """As `ask_again`, without what a plan made of the question: a cache of weights, fewer cards."""
    found, source, answers = question.found, question.machine_source, question.answers
    if problems := contradictions(loaded.recipe):
        raise ContradictionError(problems)
    check_configuration(found, loaded.recipe)
    return _decided(loaded, found, question.architecture, question.machine, source=source, answers=answers)


def _decided(
    loaded: LoadedRecipe,
    found: FoundConfig,
    architecture: Architecture,
    machine: Hardware,
    *,
    source: str,
    answers: Answers | None,
) -> PlanRequest:
    """The question, with all that the recipe leaves open decided for the model and the machine."""
    given, found_machine = loaded, machine
    check_shareable(loaded.recipe, machine.machines)
    recipe, settings = loaded.recipe, settings_of(loaded.recipe, architecture)
    lacking = sorted({device.name for device in machine.devices if not device.has_bfloat16})
    if settings.dtype == "bfloat16" and lacking:
        settings = replace(settings, dtype="float16")
        machine = _noting(machine, f"note: {', '.join(lacking)} has no bfloat16; planned as float16")
    if any(device.is_cpu for device in machine.devices) and (slow := slow_in_16_bit(settings.dtype)):
        machine = _noting(machine, slow)
    machine = _leaving_gaps(machine, settings)
    choices = tuple(filter(None, [loaded.length_note]))
    if recipe.pipeline.sequence_chunks == "auto":
        count, why = _auto_chunks(recipe, found, (architecture, settings, machine), answers)
        recipe, choices = with_chunks(recipe, count), (*choices, *filter(None, [why]))
    elif recipe.pipeline.num_chunks > 1:
        recipe = with_chunks(recipe, recipe.pipeline.num_chunks)
    if recipe.micro_batch_tokens == "auto":
        figures = recipe, architecture, settings, machine
        tokens = answered(answers, ("tokens", figures), lambda: _token_budget(*figures))
        recipe = replace(recipe, micro_batch_tokens=tokens)
        choices = *choices, describe_budget(recipe, machine)
    case, unpacking, reads_disk = _stated(recipe, architecture, settings, machine)
    return PlanRequest(
        architecture,
        case.settings,
        case.hardware,
        case.costs,
        loaded=replace(loaded, recipe=recipe),
        reads_disk=reads_disk,
        machine_source=source,
        choices=choices,
        unpacking=unpacking,
        given=given,
        found=found,
        machine=found_machine,
        answers=answers,
    )


def _stated(
    recipe: Recipe, architecture: Architecture, settings: TrainingSettings, machine: Hardware
) -> tuple[Case, Unpacking | None, bool]:
    """The case with all decided that the recipe leaves open beside its microbatches: how packed weights are unpacked,
    and whether weights are read from the disk in every round."""
    case = _tiered(recipe, architecture, settings, machine)
    skips, kept = _skips(recipe, case), _kept_blocks(recipe, case.num_workers)
    settings = replace(case.settings, skip_last_projection=skips, keep_blocks=kept)
    case = replace(case, settings=settings, costs=with_gains(case.costs, settings))
    unpacking, case = choose_unpacking(case, recipe.pipeline)
    if not case.settings.weights_on_disk:
        return case, unpacking, False
    from_disk = _read_from_disk(case)
    return from_disk, unpacking, from_disk.costs is not case.costs


def _tiered(recipe: Recipe, architecture: Architecture, settings: TrainingSettings, machine: Hardware) -> Case:
    """The case with the recipe's microbatches, and weights where they have room."""
    chunks, by_tokens = recipe.pipeline.num_chunks, recipe.token_budget is not None
    settings = replace(settings, sequence_chunks=chunks, counts_tokens=by_tokens)
    size, count = recipe.rows_per_microbatch, -(-recipe.microbatches_per_step // machine.machines) * chunks
    case = case_of(architecture, replace(settings, micro_batch_size=size, num_microbatches=count), machine)
    asked = recipe.method == "full" and recipe.nodes.shard_optimizer
    if asked is True or (asked and not judge_coarsest(case).fits):
        case = replace(case, settings=replace(case.settings, num_shards=machine.machines))
    return choose_tier(case) if recipe.weights == "auto" else case


def _auto_chunks(
    recipe: Recipe,
    found: FoundConfig,
    figures: tuple[Architecture, TrainingSettings, Hardware],
    answers: Answers | None,
) -> tuple[int, str | None]:
    """The value of `sequence_chunks: auto`, and a line that says so where rows do not fit whole."""
    architecture, settings, machine = figures

    def case(count: int, devices: tuple[Device, ...]) -> Case:
        one, disk_bytes = with_chunks(recipe, count), None if on_cpu else machine.disk_free_bytes
        figures = architecture, settings, replace(machine, devices=devices, disk_free_bytes=disk_bytes)
        if count > 1:
            return _stated(one, *figures)[0]
        budget = one.tokens_of_full_row if recipe.micro_batch_tokens == "auto" else recipe.micro_batch_tokens
        return _tiered(replace(one, micro_batch_tokens=budget), *figures)

    def work() -> int:
        devices = machine.devices[:1] if on_cpu else machine.devices
        return best_number(recipe, {count: case(count, devices) for count in chunk_counts(recipe.row_tokens)})

    on_cpu = all(device.is_cpu for device in machine.devices)
    cards = [machine.devices, *larger_cards(machine.devices)]
    if architecture.is_guess or any(judge_coarsest(case(1, devices)).fits for devices in cards):
        return 1, None
    what = f"rows of {recipe.row_tokens:,} tokens do not fit whole"
    if (obstacle := chunk_obstacle(found.config, recipe)) is not None:
        return 1, f"{CHUNKS_KEY}=1: {what}, and chunks are not possible: {obstacle}"
    key = "chunks", recipe, *figures
    count = answered(answers, key, work)
    if count == 1:
        return 1, f"{CHUNKS_KEY}=1: {what}, nor in chunks"
    how = "for processors, whatever the number of workers" if on_cpu else f"fastest on {_cards(machine)}"
    return count, f"{CHUNKS_KEY}={count}: {how}, {-(-recipe.row_tokens // count):,} tokens each: {what}"


def _token_budget(recipe: Recipe, architecture: Architecture, settings: TrainingSettings, machine: Hardware) -> int:
    """The value of `micro_batch_tokens: auto`; a row for a model whose figures are a guess."""
    if architecture.is_guess:
        return recipe.tokens_of_full_row

    def case(tokens: int, on: Hardware = machine) -> Case:
        return _stated(replace(recipe, micro_batch_tokens=tokens), architecture, settings, on)[0]

    if all(device.is_cpu for device in machine.devices):
        alone = replace(machine, devices=machine.devices[:1], disk_free_bytes=None)
        return for_processors(recipe, lambda tokens: case(tokens, alone))
    return fastest(recipe, {tokens: case(tokens) for tokens in budgets(recipe)})


def describe_budget(recipe: Recipe, machine: Hardware | None) -> str:
    """A line that says what `micro_batch_tokens: auto` became.

    Args:
        machine: None: nothing is known of the model on it.
    """
    rows, tokens = f"{counted(recipe.rows_per_microbatch, 'row')} of {recipe.row_tokens:,}", recipe.token_budget
    if machine is None:
        return f"micro_batch_tokens={tokens}: {rows}, for want of the model's figures"
    if all(device.is_cpu for device in machine.devices):
        return f"micro_batch_tokens={tokens}: {rows}, for processors, whatever the number of workers"
    how = f"fastest on {_cards(machine)} ({rows})"
    return f"micro_batch_tokens={tokens}: {how}; write it down for the same bits elsewhere"


def _cards(machine: Hardware) -> str:
    """`8x4090`."""
    cards = Counter(device.name.removeprefix("rtx-") for device in machine.devices)
    return "+".join(f"{count}x{name}" for name, count in cards.items())


def _skips(recipe: Recipe, case: Case) -> bool:
    """Whether the last projections are left out of the recompute.

    `auto` (see `train/build.py`) does so only if the inputs of all layers, which must be kept for it, take a small part
    of the host's memory. Otherwise only the last layer of each stage skips its own, which is too little to count."""
    skip, architecture, settings = recipe.pipeline.skip_last_projection, case.architecture, case.settings
    tokens = settings.num_microbatches * settings.tokens_per_microbatch
    columns = architecture.boundary_columns or architecture.hidden_size
    inputs_bytes = (len(architecture.blocks) + 2) * tokens * columns * settings.dtype_bytes
    left = usable_host_bytes(case.hardware) - (0 if settings.weights_on_disk else frozen_bytes(architecture, settings))
    return inputs_bytes <= INPUTS_SHARE * left if skip == "auto" else skip


def _kept_blocks(recipe: Recipe, num_workers: int) -> int:
    """Blocks that certainly find their activations where they left them: all that are asked for, where forward and
    backward of a block run on the same worker; with roundpipe on several that happens too seldom to be promised."""
    kept, same_worker = recipe.pipeline.keep_activations, recipe.pipeline.binds_stages or num_workers == 1
    return 0 if kept == "auto" or not same_worker else kept


def choose_tier(case: Case) -> Case:
    """The case, with frozen weights mapped from disk where host memory is too small and only that helps."""
    if case.settings.method == "full" or judge_coarsest(case).fits:
        return case
    mapped = replace(case, settings=replace(case.settings, weights_on_disk=True))
    return mapped if judge_coarsest(mapped).fits else case


def _read_from_disk(case: Case) -> Case:
    """Costs of mapped weights: where they do not fit into the memory that is left, the disk is the link."""
    costs, machine = case.costs, case.hardware
    count, per_round = len(costs.layers), 2 * len(machine.devices)
    needed = host_need(case, (count, count), per_round).total_bytes
    left, frozen = usable_host_bytes(machine) - needed, frozen_bytes(case.architecture, case.settings)
    text = f"frozen weights ({format_bytes(frozen)}) are mapped from disk"
    if frozen <= left:
        return replace(case, hardware=_noting(machine, f"note: {text} and stay in memory"))
    disk_bytes_per_s = machine.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S
    share = disk_bytes_per_s / len(machine.devices)
    note = f"assumed: {text} and read anew in every round, at {disk_bytes_per_s / 1e9:g} GB/s"
    if machine.disk_bytes_per_s is None:
        note += " (`--hardware ...,disk_gb_per_s=` corrects it)"
    slow = replace(costs, link_bytes_per_s=min(costs.link_bytes_per_s, share))
    return replace(case, hardware=_noting(machine, note), costs=slow)


def _leaving_gaps(machine: Hardware, settings: TrainingSettings) -> Hardware:
    """The machine with the memory that a run can fill where gaps between blocks take some."""
    if settings.method != "full" or not any(device.leaves_gaps for device in machine.devices):
        return machine
    filled = []
    for device in machine.devices:
        memory_bytes = without_gaps(device.memory_bytes, settings.method) if device.leaves_gaps else device.memory_bytes
        filled.append(replace(device, memory_bytes=memory_bytes))
    names = " and ".join(name for name in ALLOCATOR_VARIABLES if name in os.environ) or "a virtual GPU"
    note = f"torch's segments of memory do not grow ({names}): counted without the {GAPS / (1 + GAPS):.0%} left in gaps"
    return _noting(replace(machine, devices=tuple(filled)), f"note: {note}")


def _noting(machine: Hardware, note: str) -> Hardware:
    return replace(machine, notes=(*machine.notes, note))


def hardware_of(recipe: Recipe, architecture: Architecture) -> Hardware:
    """The machine that a recipe's `devices` mean here; assumed where no such GPU is found."""
    devices, output_dir = recipe.pipeline.devices, Path(recipe.output_dir)
    gpus, notes = visible_gpus()
    if isinstance(devices, str):
        if gpus and devices == "auto":
            require_memory(gpus)
            return this_machine(gpus, "this machine", notes, output_dir)
        why = "no GPU here: two CPU workers, as `finetune` would take"
        if architecture.parameters > MAX_PARAMETERS_ON_CPU:
            most = format_count(MAX_PARAMETERS_ON_CPU)
            why = f"no GPU here: two CPU workers; above {most} parameters `finetune` needs pipeline.devices=[cpu,cpu]"
        return _cpu_machine(2, why, output_dir)
    num_cpus = sum(name == "cpu" for name in devices)
    if num_cpus == len(devices):
        return _cpu_machine(num_cpus, "CPU workers, as the recipe says", output_dir)
    indices = [int(name.partition(":")[2]) for name in devices if name != "cpu"]
    if max(indices) >= len(gpus):
        words = f"{len(devices)}x4090"
        why = f"GPU {max(indices)} is not here, so this is planned for {words} (--hardware names another machine)"
        assumed = parse_hardware(words)
        return replace(assumed, notes=(f"assumed: {why}", *assumed.notes))
    named, shares = [gpus[index] for index in indices], Counter(indices)
    require_memory(named)
    parts = tuple(part_of(gpu, 1 / shares[index]) for gpu, index in zip(named, indices, strict=True))
    chosen = parts + cpu_devices(max(1, num_cpus))[:num_cpus]
    return this_machine(chosen, "this machine", notes, output_dir)


def _cpu_machine(count: int, why: str, output_dir: Path) -> Hardware:
    note = "assumed: CPU rates by cores, from training steps of a 135M model on a 2-core AVX-512 machine"
    return this_machine(cpu_devices(count), f"{count} CPU workers", (why, note), output_dir)


# Plans for machines whose workers are not all alike, and what `plan` says of them. No torch.


def without_small_cards(question: PlanRequest) -> Iterator[PlanRequest]:
    """The question for the GPUs of more memory only, once for each memory size that the others fall short of, with all
    that the recipe leaves open decided for them, as a run on them does.

    Stages are sized for the smallest device, since every stage may run on every worker; without the small ones they may
    be larger, and so may what fits.
    """
    for kept in larger_cards(question.machine.devices):
        yield ask_anew(replace(question, machine=replace(question.machine, devices=kept)), question.given)


def larger_cards(devices: tuple[Device, ...]) -> Iterator[tuple[Device, ...]]:
    """The GPUs of more memory only, once for each memory size that the others fall short of."""
    sizes = sorted({device.memory_bytes for device in devices if not device.is_cpu})
    for least in sizes[1:]:
        yield tuple(device for device in devices if device.memory_bytes >= least)


def with_cards_of(question: PlanRequest, least_bytes: int) -> PlanRequest:
    """The question for the devices of at least so much memory."""
    kept = tuple(device for device in question.hardware.devices if device.memory_bytes >= least_bytes)
    return question if len(kept) == question.num_workers else on_devices(question, kept)


def on_devices(question: PlanRequest, kept: tuple[Device, ...]) -> PlanRequest:
    """The question for these of its devices."""
    hardware = replace(question.hardware, devices=kept)
    costs = analytic_costs(question.architecture, question.settings, hardware)
    if question.settings.weights_on_disk:  # the disk is the link, whatever the devices'
        costs = replace(costs, link_bytes_per_s=question.costs.link_bytes_per_s)
    return replace(question, hardware=hardware, costs=costs)


def describe_idle_gpus(question: PlanRequest, fewer: PlanRequest, *, fits: bool) -> str:
    """A line that says which devices stay idle, and why; of devices that the recipe lists, that they should.

    Args:
        fits: whether it would fit with them.
    """
    least = min(device.memory_bytes for device in fewer.hardware.devices)
    out = Counter(device.name for device in question.hardware.devices if device.memory_bytes < least)
    names = " and ".join(f"{count} x {name}" for name, count in out.items())
    why = "stages sized for its memory would be slower" if fits else "no stage fits its memory"
    listed = ", ".join(names_of_cards(question, fewer))
    if question.lists_devices:
        why = "stages sized for its memory are slower" if fits else why
        return f"better without {names}: {why}; write pipeline.devices: [{listed}]"
    return f"{names} left out: {why} (pipeline.devices: [{listed}])"


def names_of_cards(question: PlanRequest, fewer: PlanRequest) -> tuple[str, ...]:
    """The devices of `question` that are in `fewer` too, as a recipe names them."""
    least, devices = min(device.memory_bytes for device in fewer.hardware.devices), question.hardware.devices
    names = question.loaded.recipe.pipeline.devices if question.lists_devices else ()
    return tuple(
        names[place] if names else f"cuda:{place}"
        for place, device in enumerate(devices)
        if device.memory_bytes >= least
    )


def who_does_what(question: PlanRequest, make_timeline: Callable[[], Timeline]) -> list[str]:
    """One line for each kind of device: its speed and its part of the work; none where all are alike.

    Args:
        make_timeline: simulates a step; not called where all are alike.
    """
    devices = question.hardware.devices
    speeds = question.costs.worker_speed or (1.0,) * len(devices)
    if len({(device.name, device.memory_bytes, speed) for device, speed in zip(devices, speeds, strict=True)}) == 1:
        return []
    work = [seconds * speed for seconds, speed in zip(busy_s(make_timeline()), speeds, strict=True)]
    smallest = min(devices, key=lambda device: device.memory_bytes)
    smallest_memory = format_bytes(smallest.memory_bytes)
    lines = [f"unequal workers; stages are sized for the smallest, {smallest.name}: {smallest_memory}"]
    kinds = sorted(zip(devices, speeds, work, strict=True), key=lambda one: (-one[1], one[0].name))
    for (name, speed), members in groupby(kinds, key=lambda one: (one[0].name, one[1])):
        parts = [part / sum(work) for _, _, part in members]
        each = sum(parts) / len(parts)
        does = f"does {each:.1%} of the work{' each' if len(parts) > 1 else ''}" if each else "stays idle: faster so"
        lines.append(f"  {len(parts)} x {name}: speed {speed:.2f}, {does}")
    return lines
