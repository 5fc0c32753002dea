"""Everything between a recipe and the first step, in the order in which a user would want to hear of mistakes:
names first, then the architecture, then the data, then memory, then the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU, host_memory
from roundpipe_cli.data.dataset import Row, TokenizedDataset, TokenizedRows, build_dataset
from roundpipe_cli.data.hold_out import hold_out
from roundpipe_cli.data.pairs import build_pairs
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.durable import disk_error, require_free_bytes
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Phase, Say, Tell
from roundpipe_cli.model.adapter_files import ADAPTER_WEIGHTS, read_adapter_tensors
from roundpipe_cli.model.architectures import check_stored_in_4bit
from roundpipe_cli.model.chunks import check_sequence_chunks
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE
from roundpipe_cli.model.fingerprint import Fingerprint, config_fingerprint
from roundpipe_cli.model.layout import LayerLayout, make_layout
from roundpipe_cli.model.load import build_skeleton, load_config, load_tokenizer, switch_off
from roundpipe_cli.model.lora import (
    ADAPTER,
    add_lora,
    continue_lora,
    initial_values,
    refuse_adapters_outside_blocks,
)
from roundpipe_cli.model.packed_weights import check_packed, quantizable_names, require_bitsandbytes
from roundpipe_cli.model.packing import check_packing
from roundpipe_cli.model.quantized_files import stored_in_4bit
from roundpipe_cli.model.source import ModelSource, resolve_model
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.model.weights_io import load_weights, packed_names
from roundpipe_cli.model.worker_model import layer_parameters
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path, tried_paths
from roundpipe_cli.recipe.schema import DatasetConfig, LoraConfig, Recipe
from roundpipe_cli.train.devices import choose_devices
from roundpipe_cli.train.optim.learning_rate import num_steps_of, schedule_of
from roundpipe_cli.train.proof import prove_once, refuse_long_rows
from roundpipe_cli.train.result.base_files import BaseFiles, describe_added, put_template, read_base_files
from roundpipe_cli.train.sampling import rows_of_steps
from roundpipe_cli.units import format_bytes, format_count

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_MEMORY_SHARE = 0.8
"""Of the free host memory, for weights; `weights: auto` maps more of them from a file."""


@dataclass
class Setup:
    """A model, its data and its workers, ready to train."""

    recipe: Recipe
    source: ModelSource
    tokenizer: Any
    dataset: TokenizedDataset
    rejected: TokenizedRows | None
    """Beside the rows of `dataset`, of preference pairs."""
    eval_rows: Sequence[Row]
    """Rows that are never trained on."""
    devices: tuple[str, ...]
    model: nn.Module
    """The skeleton; adapters included."""
    peft_model: Any
    """PEFT's model around it, or None for full fine-tuning."""
    split: ModelSplit
    store: WeightStore
    base_files: BaseFiles
    """What a whole result keeps of the base model's files."""
    model_hash: str = ""
    """Of the base weights' files; see `Fingerprint`."""
    config_hash: str = ""
    """See `config_fingerprint`."""


def data_settings(loaded: LoadedRecipe, offline: bool) -> DataSettings:
    """The recipe's data keys in the data room's terms."""
    recipe = loaded.recipe
    return DataSettings(
        datasets=tuple(_spec(dataset) for dataset in recipe.datasets),
        max_seq_length=recipe.max_seq_length,
        train_on_inputs=recipe.train_on_inputs,
        long_rows=recipe.long_rows,
        on_bad_row=recipe.on_bad_row,
        shuffle=recipe.shuffle,
        seed=recipe.seed,
        folder=loaded.folder,
        offline=offline,
        chat_template=recipe.chat_template,
    )


def read_rows(
    loaded: LoadedRecipe, tokenizer: Any, offline: bool, tell: Say
) -> tuple[TokenizedDataset, TokenizedRows | None]:
    """The rows to train on; of preference pairs the chosen ones, and the rejected ones beside them.

    Raises:
        RefusedError: see `build_dataset` and `build_pairs`.
    """
    settings = data_settings(loaded, offline)
    if loaded.recipe.objective == "dpo":
        return build_pairs(settings, tokenizer, tell)
    return build_dataset(settings, tokenizer, tell), None


def _spec(dataset: DatasetConfig) -> DatasetSpec:
    return DatasetSpec(
        path=dataset.path,
        type="auto" if dataset.type == "preference" else dataset.type,  # `build_pairs` knows
        split=dataset.split,
        name=dataset.name,
        columns={str(key): value for key, value in dataset.columns.items()},
    )


def prepare(
    loaded: LoadedRecipe,
    *,
    offline: bool,
    tell: Tell,
    elsewhere: Callable[[Sequence[LayerLayout]], Collection[int]] = lambda layouts: (),
) -> Setup:
    """Load all that a run needs.

    Args:
        offline: use local files only.
        tell: is told what happens.
        elsewhere: says which layers' masters another process keeps.

    Raises:
        RefusedError: recipe, data or model refused (exit code 2).
        ResourceError: not enough host memory (exit code 5).
    """
    recipe = loaded.recipe
    bits = recipe.packed_bits
    if bits:
        require_bitsandbytes(f"{PACKED_FORMATS[bits].key}: true")
    source = resolve_model(recipe.model, revision=recipe.revision, recipe_folder=loaded.folder, offline=offline)
    stored = stored_in_4bit(source)
    if stored:
        check_stored_in_4bit(source.name, method=recipe.method, load_in_8bit=recipe.load_in_8bit)
        require_bitsandbytes(f"{source.name}, whose files are in bitsandbytes' 4 bit")
        bits = 4
    fingerprint = Fingerprint(source)
    devices, notice = choose_devices(recipe.pipeline.devices)
    if notice:
        tell(Notice(notice))
    config = load_config(source)
    base_files = read_base_files(source, config)
    dtype = DTYPES[recipe.dtype]
    for text in switch_off(config):
        tell(Notice(text))
    model = build_skeleton(config, dtype)
    split = split_model(model)
    _refuse_large_on_cpu(model, recipe, devices)
    if recipe.packing:
        check_packing(model, split, max_seq_length=recipe.max_seq_length, micro_batch_size=recipe.micro_batch_size)
    if recipe.pipeline.num_chunks > 1:
        check_sequence_chunks(model, split, max_seq_length=recipe.max_seq_length)
    tell(Phase("tokenising the data"))
    tokenizer = load_tokenizer(source)
    dataset, rejected = read_rows(loaded, tokenizer, offline, lambda text: tell(Phase(text)))
    if dataset.chat_template is not None:
        put_template(tokenizer, dataset.chat_template)  # saved with the result
    for text in dataset.notices:
        tell(Notice(text))
    base_files = _ending_as_trained(base_files, tokenizer, recipe, tell)
    tell(Notice(f"data: {dataset.report.filter_counts()}; {dataset.report.trained_tokens} trained tokens"))
    dataset, eval_rows = _evaluation_rows(loaded, dataset, tokenizer, offline, tell)
    _refuse_unknown_ids(model, tokenizer, [dataset.rows, *([rejected] if rejected else [])], eval_rows)
    sampler = rows_of_steps(recipe, dataset)  # too few for a step: said before the weights are loaded
    if recipe.lr_scheduler_kwargs:
        schedule_of(recipe, num_steps_of(recipe, sampler))  # likewise a learning rate out of bounds
    start = _start_folder(loaded)
    peft_model = _make_trainable(model, split, recipe, source, dtype, start)

    def build_trainable(other: Any) -> tuple[nn.Module, ModelSplit]:
        smaller = build_skeleton(other, dtype)
        its_split = split_model(smaller)
        _make_trainable(smaller, its_split, recipe, source, dtype, start)
        return smaller, its_split

    packed = quantizable_names(model, split.blocks_path) if bits else frozenset()
    if stored:
        packed = packed_names(source, model) & packed
    elif bits and (whole := check_packed(model, split.blocks_path, packed, bits)):
        tell(Notice(whole))
    proof = prove_once(model, split, recipe, build_trainable, tell)
    refuse_long_rows(_longest(dataset, rejected, eval_rows), proof)
    layouts = [
        make_layout(name, parameters, dtype, packed, bits)
        for name, parameters in zip(split.layer_names(), layer_parameters(model, split), strict=True)
    ]
    tell(Phase(f"loading {format_bytes(sum(layout.num_bytes for layout in layouts))} of weights"))
    store = _make_store(recipe, layouts, tell, elsewhere(layouts))
    loading_notice = load_weights(source, model, store.set_parameter, store.set_packed)
    if loading_notice:
        tell(Notice(loading_notice))
    if peft_model is not None:
        first = initial_values(model, recipe.seed, store.base_weight, recipe.lora.init)
        for name, values in first if start is None else read_adapter_tensors(model, start).items():
            store.set_parameter(name, values)
    tell(Notice(_describe_model(config, layouts, recipe, devices)))
    return Setup(
        recipe,
        source,
        tokenizer,
        dataset,
        rejected,
        eval_rows,
        devices,
        model,
        peft_model,
        split,
        store,
        base_files,
        fingerprint.result(),
        config_fingerprint(source),
    )


def _ending_as_trained(files: BaseFiles, tokenizer: Any, recipe: Recipe, tell: Tell) -> BaseFiles:
    """The base's files with the end tokens of training; a whole result that gets more of them is told of."""
    files, added = files.ending_as_trained(tokenizer)
    if added and recipe.method == "full":
        tell(Notice(describe_added(added)))
    return files


def _make_store(recipe: Recipe, layouts: list[LayerLayout], tell: Tell, elsewhere: Collection[int]) -> WeightStore:
    """The weights' place on the host: in memory, or on a file where the recipe says so or memory is short."""
    staleness = recipe.pipeline.optimizer_staleness
    num_bytes = sum(layout.num_bytes for layout in layouts)
    available = host_memory().available_bytes
    short = recipe.weights == "auto" and recipe.method == "lora" and num_bytes > MAX_MEMORY_SHARE * available
    if recipe.weights != "mmap" and not short:
        return WeightStore(layouts, staleness, elsewhere=elsewhere)
    folder = Path(recipe.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    what = f"{format_bytes(num_bytes)} of weights are mapped from a file in {folder}"
    tell(Notice(f"{what}: {format_bytes(available)} of host memory are free" if short else what))
    require_free_bytes(folder, num_bytes, "the mapped weights")
    try:
        return WeightStore(layouts, staleness, folder)
    except OSError as error:
        raise disk_error(error, folder, "the mapped weights", num_bytes) from error


def _evaluation_rows(
    loaded: LoadedRecipe, dataset: TokenizedDataset, tokenizer: Any, offline: bool, tell: Tell
) -> tuple[TokenizedDataset, list[Row]]:
    """The rows left to train on, and those to evaluate on."""
    recipe = loaded.recipe
    rows: list[Row] = []
    if recipe.val_set_size:
        dataset, held = hold_out(dataset, recipe.val_set_size, recipe.seed)
        rows += held.rows
    if recipe.eval_datasets:
        specs = tuple(_spec(entry) for entry in recipe.eval_datasets)
        other = build_dataset(replace(data_settings(loaded, offline), datasets=specs), tokenizer)
        for text in other.notices:
            tell(Notice(f"evaluation: {text}"))
        rows += other.rows
    if rows:
        tell(Notice(f"evaluation: {len(rows)} rows, {len(dataset.rows)} to train on"))
    return dataset, rows


def _longest(dataset: TokenizedDataset, rejected: TokenizedRows | None, eval_rows: Sequence[Row]) -> int:
    """Tokens of the longest row."""
    lengths = [int(rows.lengths.max()) for rows in (dataset.rows, rejected) if rows is not None and len(rows)]
    return max([*lengths, *(len(row.input_ids) for row in eval_rows)])


def _refuse_unknown_ids(
    model: nn.Module, tokenizer: Any, datasets: Sequence[TokenizedRows], eval_rows: Sequence[Row]
) -> None:
    """Refuse data with tokens that the model has no embedding for.

    Raises:
        RefusedError: the tokenizer is not the model's.
    """
    found = max([rows.max_id for rows in datasets] + [int(row.input_ids.max()) for row in eval_rows])
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    num_rows = int(table.weight.shape[0])
    if found >= num_rows:
        raise RefusedError(
            "the data has tokens that the model has no embedding for",
            where="datasets",
            found=f"token {found}, {tokenizer.convert_ids_to_tokens(found)!r}",
            expected=f"ids below {num_rows}, the rows of the model's embedding",
            hint="use the tokenizer that the model was made with, or a model whose embedding has a row for each token",
        )


def _refuse_large_on_cpu(model: nn.Module, recipe: Recipe, devices: tuple[str, ...]) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    if recipe.pipeline.devices == "auto" and devices[0] == "cpu" and count > MAX_PARAMETERS_ON_CPU:
        raise RefusedError(
            "no GPU found, and this model is too large to train on the processor by default",
            where="pipeline.devices",
            found=f"{format_count(count)} parameters, no GPU",
            expected=f"a GPU, or at most {format_count(MAX_PARAMETERS_ON_CPU)} parameters",
            hint="to train on the processor all the same, write pipeline.devices=[cpu,cpu]",
        )


def _make_trainable(
    model: nn.Module, split: ModelSplit, recipe: Recipe, source: ModelSource, dtype: torch.dtype, start: Path | None
) -> Any:
    noisy: Any = model.get_input_embeddings()  # type: ignore[operator]
    setattr(noisy, NOISE_ATTRIBUTE, recipe.neftune_noise_alpha)
    if recipe.method == "full":
        _train_all_but(model, recipe.frozen_parameters)
        return None
    name = source.name if source.gguf_file is None else str(source.folder)
    if start is not None:
        peft_model = continue_lora(model, start, dropout=recipe.lora.dropout, dtype=dtype, base_name=name)
        refuse_other_shape(recipe.lora, peft_model.peft_config[ADAPTER], start)
        refuse_adapters_outside_blocks(model, split.blocks_path)
        return peft_model
    peft_model = add_lora(
        model,
        r=recipe.lora.r,
        alpha=recipe.lora.alpha,
        dropout=recipe.lora.dropout,
        target_modules=recipe.lora.target_modules,
        dtype=dtype,
        base_name=name,
        blocks_path=split.blocks_path,
        modules_to_save=recipe.lora.modules_to_save,
        use_rslora=recipe.lora.use_rslora,
        use_dora=recipe.lora.use_dora,
        init=recipe.lora.init,
    )
    refuse_adapters_outside_blocks(model, split.blocks_path)
    return peft_model


def _train_all_but(model: nn.Module, patterns: Sequence[str]) -> None:
    """Full fine-tuning of every parameter in whose name none of the patterns is found.

    Raises:
        RefusedError: a pattern that is none or is found nowhere, or nothing is left.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name, _ in model.named_parameters() if re.search(pattern, name)}
        except re.error as error:
            raise RefusedError(
                "not a regular expression", where="frozen_parameters", found=f"{pattern}: {error}"
            ) from error
        if not found:
            example = next(name for name, _ in model.named_parameters())
            raise RefusedError(
                "no parameter has such a name",
                where="frozen_parameters",
                found=pattern,
                expected=f"names like {example}",
            )
        frozen |= found
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if all(not parameter.requires_grad for parameter in model.parameters()):
        raise RefusedError("nothing is left to train", where="frozen_parameters", found=", ".join(patterns))


def _start_folder(loaded: LoadedRecipe) -> Path | None:
    """Folder of the adapter to train further.

    Raises:
        RefusedError: it is named and not there.
    """
    named = loaded.recipe.lora.start_from
    if named is None or loaded.recipe.method == "full":
        return None
    folder = resolve_path(named, loaded.folder)
    if folder is None or not (folder / ADAPTER_WEIGHTS).is_file():
        tried = ", ".join(str(path / ADAPTER_WEIGHTS) for path in tried_paths(named, loaded.folder))
        raise RefusedError("no adapter there", where="lora.start_from", found=named, expected=f"one of {tried}")
    return folder


def refuse_other_shape(lora: LoraConfig, adapter: Any, folder: Path) -> None:
    """Keys of the recipe must not say something else than the adapter that is trained further; a key that stands at
    its default says nothing.

    Raises:
        RefusedError: one does.
    """
    targets = adapter.target_modules
    theirs = {
        "r": adapter.r,
        "alpha": float(adapter.lora_alpha),
        "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets)),
        "modules_to_save": tuple(sorted(adapter.modules_to_save or ())),
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
    }
    for key, value in theirs.items():
        asked = getattr(lora, key)
        asked = tuple(sorted(asked)) if isinstance(asked, tuple) else asked
        if asked not in (value, getattr(LoraConfig(), key)):
            raise RefusedError(
                "the adapter to start from has another shape",
                where=f"lora.{key}",
                found=str(asked),
                expected=f"{value}, as in {folder}",
                hint="delete the line",
            )


def _describe_model(config: Any, layouts: list[LayerLayout], recipe: Recipe, devices: tuple[str, ...]) -> str:
    total = sum(layout.num_parameters for layout in layouts)
    trained = sum(place.num_elements for layout in layouts for place in layout.trainable)
    return (
        f"model: {config.model_type}, {len(layouts) - 2} blocks, {format_count(total)} parameters, "
        f"{format_count(trained)} trained ({recipe.method}, {recipe.dtype}) on {', '.join(devices)}"
    )


def experts_per_token(text_config: Any) -> int:
    """Experts that compute a token; 0 where there are none."""
    return next((getattr(text_config, k) for k in ("num_experts_per_tok", "top_k_experts") if _has(text_config, k)), 0)


def active_parameters(model: nn.Module, layouts: list[LayerLayout]) -> list[int]:
    """Per layer, the parameters that one token meets: of fused experts only the chosen share."""
    config: Any = model.config
    text = config.get_text_config()
    experts = next(
        (getattr(text, k) for k in ("num_experts", "num_local_experts", "n_routed_experts") if _has(text, k)), 0
    )
    share = experts_per_token(text) / experts if experts and experts_per_token(text) else 1.0
    result = []
    for layout in layouts:
        count = 0.0
        for place in layout.places:
            count += place.num_elements * (share if ".experts." in place.name else 1.0)
        result.append(round(count))
    return result


def _has(config: Any, key: str) -> bool:
    return isinstance(getattr(config, key, None), int) and getattr(config, key) > 0
