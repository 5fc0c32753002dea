"""The result of a run loaded for answers beyond a device's memory: its weights are on the host, as the run has them."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.hardware import ASSUMED_DISK_BYTES_PER_S
from roundpipe_cli.costs.machine import cpu_devices, host_memory, num_cores, this_machine
from roundpipe_cli.costs.nvidia_smi import visible_gpus
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.streaming import DevicePlan, StreamedModel, plan_devices
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.events import Notice, Tell, tell_notices
from roundpipe_cli.model.adapter_files import put_adapter, read_adapter_config, read_adapter_tensors, trained_tokens
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.layout import layer_parameters, make_layout
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.new_tokens import NewTokens
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.train.prepare.base_files import GENERATION_CONFIG
from roundpipe_cli.train.prepare.devices import choose_devices, make_backends
from roundpipe_cli.train.prepare.fill import fill_store
from roundpipe_cli.train.prepare.ready import DTYPES
from roundpipe_cli.train.prepare.setup import (
    MAX_MEMORY_SHARE,
    make_weight_store,
    names_to_pack,
    weight_formats,
)
from roundpipe_cli.train.result.generate import load_result, move_to_gpu, needs_streaming, tokenizer_of
from roundpipe_cli.units import format_bytes

ROOM_SHARE = 0.8
"""Share of a device's free memory for weights, beside activations, keys and values."""
BATCH = 64
"""Prompts of a batch that an advice names: a pass costs them what it costs one."""


@contextlib.contextmanager
def opened_model(
    result: Path,
    source: ModelSource,
    dtype: str,
    *,
    is_adapter: bool,
    stream: bool,
    folder: Path,
    cache_bytes: int | None = None,
    tell: Tell,
) -> Iterator[tuple[Any, Any, str | None]]:
    """The result's model, its tokenizer, and where it computes, if its own device does not tell.

    Args:
        stream: otherwise only where the whole model has no room.

    Raises:
        RefusedError: as of `load_result` or `streamed`.
    """
    if not (stream or needs_streaming(source, dtype)):
        model, tokenizer = load_result(result, source, dtype, is_adapter=is_adapter)
        yield move_to_gpu(model, lambda text: tell(Notice(text))), tokenizer, None
        return
    tokenizer = tokenizer_of(result, source, is_adapter=is_adapter)
    options: dict[str, Any] = {"is_adapter": is_adapter, "folder": folder, "cache_bytes": cache_bytes, "tell": tell}
    with streamed(result, source, dtype, **options) as (model, devices):
        yield model, tokenizer, f"{' and '.join(devices)}".replace("cpu", "the processor")


@contextlib.contextmanager
def streamed(
    result: Path,
    source: ModelSource,
    dtype: str,
    *,
    is_adapter: bool,
    folder: Path,
    cache_bytes: int | None,
    tell: Tell,
) -> Iterator[tuple[Any, Sequence[str]]]:
    """The result's model, whose layers fetch their weights while it answers as any of transformers', and its devices.

    Args:
        folder: for weights that host memory has no room for.
        cache_bytes: of each device's memory, for weights; None: what is free.

    Raises:
        RefusedError: it cannot be loaded, or cannot be cut into layers.
    """
    recipe = _recipe_of(result, source, folder, dtype)
    devices = tuple(dict.fromkeys(choose_devices("auto")[0]))
    on_host = devices == ("cpu",)
    model, split, answering, new = _skeleton(source, DTYPES[dtype], result if is_adapter else None)
    stored, packed_as = formats = weight_formats(source, recipe, tell)
    packed = names_to_pack(source, formats, model, split, tell=tell) if packed_as else frozenset()
    model.requires_grad_(False)
    layers = zip(split.layer_names(), layer_parameters(model, split), strict=True)
    layouts = [make_layout(name, some, DTYPES[dtype], packed, packed_as=packed_as) for name, some in layers]
    if on_host and cache_bytes is not None and cache_bytes < sum(layout.num_bytes for layout in layouts[1:]):
        recipe = replace(recipe, weights="mmap")
    store = make_weight_store(recipe, layouts, tell)
    budget = _room_bytes(devices) if cache_bytes is None else cache_bytes
    plans = plan_devices(layouts, len(devices), sys.maxsize if on_host and not store.is_mapped else budget)
    tell_notices(tell, *_describe(plans, devices, is_mapped=store.is_mapped))
    base, kept = replace(recipe, method="full"), packed if packed_as == stored else ()  # nothing of it is new
    fill_store(store, source, model, base, packed=kept, new=new, start=result if is_adapter else None, tell=tell)
    if is_adapter:
        _put_tensors(store, model, result)
    pairs = list(zip(make_backends(devices, num_cores()), plans, strict=True))
    with PageLocks(store, devices, "auto", tell), StreamedModel(model, split, store, pairs):
        yield answering.eval(), devices


def _skeleton(
    source: ModelSource, dtype: torch.dtype, adapter: Path | None
) -> tuple[Any, ModelSplit, Any, NewTokens | None]:
    """The model without weights, where it is cut, what answers (PEFT's model, with an adapter), and the adapter's
    tokens."""
    model: Any = build_skeleton(load_config(source), dtype)
    if source.gguf_file is None:
        untie_stored(model, source.folder)
    split = split_model(model)
    _read_generation_config(model, source)
    if adapter is None:
        return model, split, model, None
    model.requires_grad_(False)
    config = read_adapter_config(adapter)
    config.lora_dropout, known = 0.0, len(model.get_input_embeddings().weight)
    new = NewTokens(known, {str(number): number for number in trained_tokens(config.trainable_token_indices)})
    return model, split, put_adapter(model, config, adapter), new


def _describe(plans: Sequence[DevicePlan], devices: Sequence[str], *, is_mapped: bool) -> Iterator[str]:
    """Notices on what stays, what comes past for each token, and how fast that is by the figures of this machine."""
    kept, passing = (sum(getattr(plan, name) for plan in plans) for name in ("kept_bytes", "passing_bytes"))
    gpus = [] if devices == ("cpu",) else visible_gpus()[0]
    machine = this_machine(tuple(gpus) or cpu_devices(1), "", (), Path())
    link = min(device.link_bytes_per_s for device in machine.devices)
    if is_mapped:
        link = min(link, machine.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S)
    memory = min(device.memory_bytes_per_s for device in machine.devices)
    seconds = kept / memory + passing / link
    where = f"on {', '.join(devices)}" if gpus else "in host memory"
    origin = "disk" if is_mapped else "host memory"
    past = f", {format_bytes(passing)} come past from {origin} for each token" if passing else ""
    yield (
        f"streaming: {format_bytes(kept)} of weights stay {where}{past}; at most about {1 / seconds:.2g} tokens/s for "
        f"a prompt, by this machine's figures"
    )
    if seconds > 1:
        yield f"below 1 token/s: a batch of {BATCH} prompts (--prompts FILE) takes the same pass for all of them"


def _recipe_of(result: Path, source: ModelSource, folder: Path, dtype: str) -> Recipe:
    """The recipe by which the result's base lay packed in its run; a plain one, where nothing says."""
    file = result / "recipe.yaml"
    plain = Recipe(model=source.name, datasets=(), learning_rate=0.0, output_dir="")
    recipe = load_recipe(file).recipe if file.is_file() else plain
    return replace(recipe, model=source.name, output_dir=str(folder), dtype=dtype, weights="auto", method="lora")


def _read_generation_config(model: Any, source: ModelSource) -> None:
    """Give a skeleton the settings of generation that transformers gives a model that it loads."""
    from transformers import GenerationConfig

    for name in (GENERATION_CONFIG, "config.json"):
        is_models = name != GENERATION_CONFIG
        with contextlib.suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.generation_config = GenerationConfig.from_pretrained(
                str(source.folder), name, local_files_only=True, _from_model_config=is_models
            )
            return


def _put_tensors(store: WeightStore, model: nn.Module, adapter: Path) -> None:
    """Write an adapter's tensors into the store, and into the buffers of a model that has its modules."""
    places = {place.name for layout in store.layouts for place in layout.places}
    twins = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in twins.items() if name in places}
    buffers = dict(model.named_buffers())
    for name, values in read_adapter_tensors(model, adapter).items():
        if name in buffers:
            buffers[name].copy_(values)
        else:
            store.set_parameter(names[id(twins[name])], values)


def _room_bytes(devices: tuple[str, ...]) -> int:
    """Memory of each device for weights."""
    if devices == ("cpu",):
        return int(MAX_MEMORY_SHARE * host_memory().available_bytes)
    return int(ROOM_SHARE * min(cuda.memory_bytes(index) for index in range(len(devices))))
