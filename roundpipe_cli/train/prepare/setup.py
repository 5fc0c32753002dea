"""Everything between a recipe and the first step, in the order in which users want to learn of mistakes:
names first, then the architecture, then the data, then memory, then the weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU, host_memory, slow_in_16_bit
from roundpipe_cli.costs.memory import MAX_MEMORY_SHARE
from roundpipe_cli.costs.models import stored_as
from roundpipe_cli.costs.nvidia_smi import order_notice
from roundpipe_cli.costs.settings import head_chunk_tokens
from roundpipe_cli.data.tokenized import Row, TokenizedDataset, choose_packing
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import ContradictionError, RefusedError
from roundpipe_cli.events import Event, Notice, Phase, Tell, tell_notices
from roundpipe_cli.files import disk_error, require_free_bytes
from roundpipe_cli.heap import settle_heap
from roundpipe_cli.model.attention import describe_slow_kernels, try_other_ends
from roundpipe_cli.model.chunks import check_packing, check_sequence_chunks
from roundpipe_cli.model.files.quantization import check_stored_in_4bit, describe_repacking
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.files.supported import check_mask_bytes, chunk_refusal
from roundpipe_cli.model.fingerprint import Fingerprint, config_fingerprint
from roundpipe_cli.model.fused import FusedOps, find_fused_ops, fused_counts
from roundpipe_cli.model.layout import LayerLayout, layer_parameters, make_layout
from roundpipe_cli.model.load import build_skeleton, load_config, switch_off
from roundpipe_cli.model.lora import (
    describe_adapted_experts,
    describe_dead_alternatives,
    describe_left_out,
    experts_per_token,
)
from roundpipe_cli.model.meta_counts import NotBuiltError, count_on_meta
from roundpipe_cli.model.new_tokens import NewTokens, grow_tables, load_with_tokens
from roundpipe_cli.model.router_loss import describe_router_loss, leave_out_router_loss
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.model.stored.packed_weights import check_packed, quantizable_names, require_bitsandbytes
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.model.weights_io import packed_names
from roundpipe_cli.planning.chunk_count import CHUNKS_KEY, with_chunks
from roundpipe_cli.planning.question import PlanRequest, ask, ask_again, describe_budget
from roundpipe_cli.planning.run_plan import maps_weights
from roundpipe_cli.planning.unpacking import Unpacking
from roundpipe_cli.recipe.check import contradictions
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.train.prepare.base_files import BaseFiles, describe_added, put_template, read_base_files
from roundpipe_cli.train.prepare.devices import choose_devices, with_dtype_of
from roundpipe_cli.train.prepare.fill import fill_store
from roundpipe_cli.train.prepare.learning_rate import num_steps_of, rate_schedule_of
from roundpipe_cli.train.prepare.proof import BuildModel, prove_once, refuse_long_rows
from roundpipe_cli.train.prepare.ready import DTYPES, Setup
from roundpipe_cli.train.prepare.rows import (
    describe_padded_to_chunks,
    evaluation_rows,
    read_rows,
    read_teacher,
    refuse_unknown_ids,
)
from roundpipe_cli.train.prepare.steps import mix_of, rows_of_steps
from roundpipe_cli.train.prepare.trainable import (
    describe_reference,
    describe_unreached,
    make_trainable,
    start_folder,
    start_hash,
)
from roundpipe_cli.units import counted, format_bytes, format_count

# The choice of `packing: auto` for a run, from its rows and its model.


def with_packing(
    recipe: Recipe, model: nn.Module, split: ModelSplit, dataset: TokenizedDataset, *, tell: Tell
) -> Recipe:
    """The recipe with `packing` decided; `tell` gets the reason."""
    if recipe.packing == "auto":
        mix = mix_of(recipe, dataset.rows_by_spec)
        choice = choose_packing(mix, dataset.rows.lengths, recipe, _obstacle(recipe, model, split))
        tell(Notice(choice.describe()))
        recipe = replace(recipe, packing=choice.packs)
    if not recipe.packs:
        tell_notices(tell, describe_padded_to_chunks(dataset.rows.lengths, recipe.pipeline.num_chunks))
    return recipe


def _obstacle(recipe: Recipe, model: nn.Module, split: ModelSplit) -> str | None:
    if recipe.unpackable is not None:
        return recipe.unpackable
    shape = {"max_seq_length": recipe.row_tokens, "micro_batch_size": recipe.rows_per_microbatch}
    try:
        check_packing(model, split, **shape)
        if recipe.kernels == "reference":  # whose masks are of all pairs of tokens
            check_mask_bytes(**shape)
    except RefusedError as error:
        return error.in_short
    return None


# The values of `sequence_chunks: auto` and `micro_batch_tokens: auto` for a run.


def _with_microbatches(
    loaded: LoadedRecipe, tell: Tell, smallest: Callable[[int], int], asked: PlanRequest | None
) -> LoadedRecipe:
    """The recipe with `sequence_chunks` and `micro_batch_tokens` decided; whole rows, and one of them, where `plan` has
    no figures of the model."""
    recipe, found = loaded.recipe, None
    if "auto" not in (recipe.pipeline.sequence_chunks, recipe.micro_batch_tokens):
        return loaded
    with suppress(RefusedError):  # another check reports what is wrong
        found = ask_here(loaded, asked)
    count, tokens = recipe.pipeline.num_chunks, None
    if found is not None:
        count, tokens = found.loaded.recipe.pipeline.num_chunks, found.loaded.recipe.token_budget
        tell_notices(tell, *(text for text in found.choices if text.startswith(CHUNKS_KEY)))
    if recipe.pipeline.sequence_chunks == "auto":
        count = -smallest(-count)  # the most that a machine of the run needs
    recipe = with_chunks(recipe, count)
    if recipe.micro_batch_tokens == "auto":
        recipe = replace(recipe, micro_batch_tokens=smallest(tokens or recipe.tokens_of_full_row))
        tell(Notice(describe_budget(recipe, found.hardware if found is not None else None)))
    return replace(loaded, recipe=recipe)


def ask_here(loaded: LoadedRecipe, asked: PlanRequest | None) -> PlanRequest:
    """The planner's question on this machine, with the model's own count where the tables do not know it.

    Args:
        asked: before torch was there, so without that count; None: there was no answer, or nobody asked.
    """
    if asked is None or asked.found.needs_building:
        return ask(loaded, here=True, build=_count_blocks, found=None if asked is None else asked.found)
    return ask_again(asked, loaded)


def _asked_here(loaded: LoadedRecipe, asked: PlanRequest | None) -> PlanRequest | None:
    """Question of `ask_here`; None where another check reports what is wrong."""
    with suppress(RefusedError):
        return ask_here(loaded, asked)
    return None


def _count_blocks(found: FoundConfig) -> Mapping[str, Any] | None:
    """The counts that `plan` takes of a model that the tables do not know."""
    with suppress(NotBuiltError):
        return count_on_meta(found.config, found.name, found.folder)
    return None


# How a run unpacks packed weights: as `plan` says for this machine.


def decide_unpacking(
    loaded: LoadedRecipe, packed_as: PackedName | None, tell: Tell, asked: PlanRequest | None = None
) -> bool:
    """Whether weights packed as `packed_as` are unpacked once per visit of a stage; else for each microbatch."""
    if packed_as is None:
        return False
    question = _asked_here(loaded, asked)
    found = None if question is None else question.unpacking
    unpacking = found or Unpacking(PACKED_FORMATS[packed_as].label, once=False, lacking="figures of this model")
    tell(Notice(unpacking.describe()))
    return unpacking.once


def prepare(
    loaded: LoadedRecipe,
    *,
    offline: bool,
    tell: Tell,
    source: ModelSource | None = None,
    asked: PlanRequest | None = None,
    trains: bool = True,
    smallest: Callable[[int], int] = lambda tokens: tokens,
    elsewhere: Callable[[Sequence[LayerLayout]], Collection[int]] = lambda layouts: (),
) -> Setup:
    """Load all that a run needs.

    Args:
        source: the base model's files, where they were found before.
        asked: see `ask_here`.
        trains: False: the rows are only scored, however few there are.
        smallest: of the numbers of all machines of the run.
        elsewhere: says which layers' masters another process keeps.

    Raises:
        RefusedError: recipe, data or model refused (exit code 2).
        ResourceError: not enough host memory (exit code 5).
    """
    settle_heap()
    recipe = loaded.recipe
    if recipe.packed_as is not None and PACKED_FORMATS[recipe.packed_as].needs_bitsandbytes:
        require_bitsandbytes(f"{PACKED_FORMATS[recipe.packed_as].key}: true")
    source = source or resolve_model(
        recipe.model, revision=recipe.revision, recipe_folder=loaded.folder, offline=offline, tell=tell
    )
    config, base_files = config_and_files(source, recipe, tell)
    loaded = _with_microbatches(loaded, tell, smallest, asked)  # which may build the model: its type is known now
    stored, packed_as = formats = weight_formats(source, recipe, tell)
    fingerprint = Fingerprint(source)
    devices, loaded = _on_devices(loaded, tell)
    recipe = loaded.recipe
    model = build_skeleton(config, DTYPES[recipe.dtype])
    if source.gguf_file is None and (untied := untie_stored(model, source.folder)):
        tell(Notice(untied))
    split = split_model(model)
    slow = describe_slow_kernels(model.get_submodule(split.blocks_path).children(), devices)
    balance = describe_router_loss(split.routers, split.no_router_loss)
    tell_notices(tell, balance, describe_unreached(model, split), slow)
    _check_model(model, split, recipe, devices, tell=tell)
    tokenizer, new = load_with_tokens(source, recipe.add_tokens)
    grow_tables(model, new.ids)
    dataset, evaluation, base_files = _read_data(loaded, tokenizer, base_files, offline, tell=tell)
    base_files = base_files.with_tokenizer(source, tokenizer)
    tell_notices(tell, *new.describe(dataset.rows))
    refuse_unknown_ids(model, tokenizer, dataset.sides, evaluation)
    vocabulary = config.get_text_config().vocab_size
    teacher = read_teacher(loaded, dataset, tokenizer, vocabulary)
    tell_notices(tell, *(() if teacher is None else teacher.describe(evaluation)))
    recipe = with_packing(recipe, model, split, dataset, tell=tell)
    sampler = rows_of_steps(recipe, dataset) if trains else None  # too few rows are reported now
    if recipe.lr_scheduler_kwargs and sampler is not None:
        rate_schedule_of(recipe, num_steps_of(recipe, sampler))  # and a learning rate out of bounds
    start = start_folder(loaded)
    put_into, build = _making_trainable(recipe, source, start, new)
    if start is None:
        tell_notices(tell, *_describe_targets(model, split, recipe))
    peft_model = put_into(model, split)
    adapted = describe_adapted_experts(model) if peft_model is not None else None
    tell_notices(tell, adapted, describe_reference(recipe, source, start))
    layouts, packed = lay_out(source, formats, model, split, dtype=recipe.dtype, tell=tell)
    proof = prove_once(model, split, recipe, build, tell)
    longest = max([int(dataset.lengths.max()), *(len(row.input_ids) for row in evaluation)])
    refuse_long_rows(longest, proof)
    store = make_weight_store(recipe, layouts, tell, elsewhere(layouts), asked=lambda: _asked_here(loaded, asked))
    kept = packed if packed_as == stored else ()
    fill_store(store, source, model, recipe, packed=kept, new=new, start=start, tell=tell)
    tell(Notice(_describe_model(config, layouts, recipe, devices), is_detail=True))
    fused = None if proof.not_fused else _find_fused(recipe, model, split, tell)
    chunk = head_chunk_tokens(recipe.head_chunk_tokens, vocabulary)
    return Setup(
        recipe=replace(recipe, head_chunk_tokens=chunk),
        source=source,
        tokenizer=tokenizer,
        dataset=dataset,
        eval_rows=evaluation,
        teacher=teacher,
        devices=devices,
        model=model,
        peft_model=peft_model,
        split=split,
        store=store,
        base_files=base_files,
        model_hash=fingerprint.result(),
        config_hash=config_fingerprint(source),
        start_hash=start_hash(start, recipe),
        fused=fused,
        build=build,
        unpacks_once=decide_unpacking(loaded, packed_as if packed else None, tell, asked),
    )


def prove_from_configuration(loaded: LoadedRecipe, source: ModelSource, tell: Tell) -> None:
    """The checks and the proof of `prepare` that need no weights and no rows; `prepare` finds the proof in the cache.

    Raises:
        RefusedError: the model cannot be trained as the recipe says.
    """

    def tell_phase(event: Event) -> None:
        if isinstance(event, Phase):  # `prepare` says the rest
            tell(event)

    devices, loaded = _on_devices(loaded, tell_phase)
    recipe = loaded.recipe
    config, _ = config_and_files(source, recipe, tell_phase)
    model = build_skeleton(config, DTYPES[recipe.dtype])
    split = split_model(model)
    _check_model(model, split, recipe, devices, tell=tell_phase)
    new = load_with_tokens(source, recipe.add_tokens)[1] if recipe.add_tokens else NewTokens(sys.maxsize)
    grow_tables(model, new.ids)
    put_into, build = _making_trainable(recipe, source, start_folder(loaded), new)
    put_into(model, split)
    prove_once(model, split, recipe, build, tell_phase)


def _describe_targets(model: nn.Module, split: ModelSplit, recipe: Recipe) -> list[str]:
    targets = recipe.lora.target_modules
    if recipe.method != "lora" or not isinstance(targets, str):
        return []
    is_all = targets == "all-linear"
    return describe_left_out(model, split.blocks_path) if is_all else describe_dead_alternatives(model, targets)


def _on_devices(loaded: LoadedRecipe, tell: Tell) -> tuple[tuple[str, ...], LoadedRecipe]:
    """The device of each worker, and the recipe in a data type that all of them have."""
    devices, no_gpu = choose_devices(loaded.recipe.pipeline.devices)
    recipe, other_dtype = with_dtype_of(loaded.recipe, devices)
    notices = [no_gpu, other_dtype, None if "cpu" in devices else order_notice()]
    if "cpu" in devices:
        if recipe.float16_accumulation:
            notices.append("float16_accumulation has no effect here: processors add up in float32")
        if recipe.deterministic:
            notices.append("deterministic has no effect here: processors compute the same bits without it")
        notices.append(slow_in_16_bit(recipe.dtype))
    tell_notices(tell, *notices)
    return devices, replace(loaded, recipe=recipe)


def config_and_files(source: ModelSource, recipe: Recipe, tell: Tell) -> tuple[Any, BaseFiles]:
    """The model's configuration, without what cannot be trained, and the files that a whole result keeps."""
    config = load_config(source)
    base_files = read_base_files(source, config)
    texts = switch_off(config)
    if (recipe.pipeline.num_chunks > 1 or recipe.mlp_chunk_tokens) and (without := leave_out_router_loss(config)):
        texts.append(without)
    tell_notices(tell, *texts)
    return config, base_files


def _check_model(model: nn.Module, split: ModelSplit, recipe: Recipe, devices: tuple[str, ...], *, tell: Tell) -> None:
    """Raise a RefusedError for a model that does not suit the devices, or cannot compute as the recipe asks; `tell`
    gets the reason why chunks attend with masks."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if recipe.pipeline.devices == "auto" and devices[0] == "cpu" and count > MAX_PARAMETERS_ON_CPU:
        raise RefusedError(
            "no GPU found, and this model is too large to train on the processor by default",
            where="pipeline.devices",
            found=f"{format_count(count)} parameters, no GPU",
            expected=f"a GPU, or at most {format_count(MAX_PARAMETERS_ON_CPU)} parameters",
            hint="to train on the processor all the same, write pipeline.devices=[cpu,cpu]",
        )
    if recipe.packs:
        check_packing(model, split, max_seq_length=recipe.row_tokens, micro_batch_size=recipe.rows_per_microbatch)
    if recipe.pipeline.num_chunks > 1:
        check_sequence_chunks(model, split, max_seq_length=recipe.row_tokens)
        if recipe.dtype != "float32" and recipe.kernels == "auto":
            tell_notices(tell, try_other_ends(device for device in devices if device != "cpu"))


def prove_chunks(setup: Setup, recipe: Recipe, tell: Tell) -> None:
    """The checks and the proof of `prepare` for a run that goes on in chunks, as `recipe` says.

    Raises:
        RefusedError: the model, or the recipe, has no chunks.
    """
    if problems := contradictions(recipe):
        raise ContradictionError(problems)
    if setup.split.routers is not None:
        raise chunk_refusal("output_router_logits", "a balancing loss, which is a sum over whole sequences")
    assert setup.build is not None
    _check_model(setup.model, setup.split, recipe, setup.devices, tell=tell)
    prove_once(setup.model, setup.split, recipe, setup.build, tell)


def _read_data(
    loaded: LoadedRecipe, tokenizer: Any, base_files: BaseFiles, offline: bool, *, tell: Tell
) -> tuple[TokenizedDataset, list[Row], BaseFiles]:
    """The rows (as `evaluation_rows`), and the base's files with the end tokens of training."""
    tell(Phase("tokenising the data"))
    dataset = read_rows(loaded, tokenizer, offline, lambda text: tell(Phase(text)))
    if dataset.chat_template is not None:
        put_template(tokenizer, dataset.chat_template)  # saved with the result
    tell_notices(tell, *dataset.notices)
    if loaded.recipe.method == "full" or loaded.recipe.eval_samples:  # an adapter has no such files
        base_files, added = base_files.ending_as_trained(tokenizer)
        if added and loaded.recipe.method == "full":
            tell(Notice(describe_added(added)))
    counts = f"data: {dataset.report.filter_counts()}; {dataset.report.trained_tokens} trained tokens"
    tell(Notice(counts, is_detail=dataset.report.rows_kept == dataset.report.rows_read))
    return *evaluation_rows(loaded, dataset, tokenizer, offline, tell=tell), base_files


def _making_trainable(
    recipe: Recipe, source: ModelSource, start: Path | None, new: NewTokens
) -> tuple[Callable[[nn.Module, ModelSplit], Any], BuildModel]:
    """`make_trainable` as the recipe says, and the same for a new model, for the proof's smaller one."""
    dtype = DTYPES[recipe.dtype]
    put_into = functools.partial(make_trainable, recipe=recipe, source=source, new=new, dtype=dtype, start=start)

    def build(config: Any) -> tuple[nn.Module, ModelSplit]:
        model = build_skeleton(config, dtype)
        split = split_model(model)
        put_into(model, split)
        return model, split

    return put_into, build


def weight_formats(source: ModelSource, recipe: Recipe, tell: Tell) -> tuple[PackedName | None, PackedName | None]:
    """Formats of the blocks' frozen weights, in the files and in the run; None: they are not packed."""
    stored = stored_as(source.config) if source.gguf_file is None else None
    packed_as = recipe.packed_from(stored)
    if stored == "4bit":
        check_stored_in_4bit(
            source.name, method=recipe.method, packed_as=recipe.packed_as, unpacks=recipe.load_in_16bit
        )
        require_bitsandbytes(f"{source.name}, whose files are in bitsandbytes' 4 bit")
    elif stored is not None and packed_as not in (None, stored):
        tell(Notice(describe_repacking(stored, packed_as)))
    return stored, packed_as


def lay_out(
    source: ModelSource,
    formats: tuple[PackedName | None, PackedName | None],
    model: nn.Module,
    split: ModelSplit,
    *,
    dtype: str,
    trains: bool = True,
    tell: Tell,
) -> tuple[list[LayerLayout], frozenset[str]]:
    """Each layer's layout, of a model with its adapters, and the names of the weights that are packed; `trains`:
    otherwise all are frozen."""
    stored, packed_as = formats
    packed = quantizable_names(model, split.blocks_path) if packed_as else frozenset()
    if packed_as is not None and packed_as == stored:
        packed &= packed_names(source, model, stored)
        label = PACKED_FORMATS[stored].label
        tell(Notice(f"{counted(len(packed), 'weight')} stay in {label}, as the model's files have them"))
    elif packed_as and (whole := check_packed(model, split.blocks_path, packed, packed_as)):
        tell(Notice(whole))
    if not trains:
        model.requires_grad_(False)
    layers = zip(split.layer_names(), layer_parameters(model, split), strict=True)
    return [make_layout(name, some, DTYPES[dtype], packed, packed_as=packed_as) for name, some in layers], packed


def _find_fused(recipe: Recipe, model: nn.Module, split: ModelSplit, tell: Tell) -> FusedOps | None:
    if recipe.kernels == "reference":
        return None
    found = find_fused_ops(model, split)
    text = ", ".join(f"{count} {name}" for name, count in fused_counts(found).items())
    own_code = "kernels=reference uses the model's and PEFT's own code"
    tell(Notice(f"kernels: {text or 'none of this model is fused'} ({own_code})", is_detail=bool(text)))
    return found


def make_weight_store(
    recipe: Recipe,
    layouts: list[LayerLayout],
    tell: Tell,
    elsewhere: Collection[int] = (),
    *,
    asked: Callable[[], PlanRequest | None] = lambda: None,
) -> WeightStore:
    """The weights' place on the host: in memory, or on a file where the recipe says so or memory is short, by their own
    size or with all that `asked`, the planner's question, counts beside them."""
    num_bytes = sum(layout.num_bytes for layout in layouts)
    available = host_memory().available_bytes
    is_open = recipe.weights == "auto" and recipe.method == "lora"
    short = is_open and num_bytes > MAX_MEMORY_SHARE * available
    if is_open and not short:
        question = asked()
        short = question is not None and maps_weights(question)
    if recipe.weights != "mmap" and not short:
        return WeightStore(layouts, elsewhere=elsewhere)
    folder = named_path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    what = f"{format_bytes(num_bytes)} of weights are mapped from a file in {folder}"
    why = f"with them in memory, the run has no room in the {format_bytes(available)} of it that are free"
    tell(Notice(f"{what}: {why}" if short else what))
    require_free_bytes(folder, num_bytes, "the mapped weights")
    try:
        return WeightStore(layouts, folder)
    except OSError as error:
        raise disk_error(error, folder, "the mapped weights", num_bytes) from error


def _describe_model(config: Any, layouts: list[LayerLayout], recipe: Recipe, devices: tuple[str, ...]) -> str:
    total = sum(layout.num_parameters for layout in layouts)
    trained = sum(place.num_elements for layout in layouts for place in layout.trainable)
    return (
        f"model: {config.model_type}, {len(layouts) - 2} blocks, {format_count(total)} parameters, "
        f"{format_count(trained)} trainable ({recipe.method}, {recipe.dtype}) on {', '.join(devices)}"
    )


def active_parameters(model: nn.Module, layouts: list[LayerLayout]) -> list[int]:
    """Per layer, the parameters that one token meets: of fused experts only the chosen share."""
    config: Any = model.config
    text = config.get_text_config()
    counts = (getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    share = experts_per_token(text) / experts if experts and experts_per_token(text) else 1.0
    return [
        round(sum(place.num_elements * (share if ".experts." in place.name else 1.0) for place in layout.places))
        for layout in layouts
    ]
