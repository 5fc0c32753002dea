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
from transformers import GenerationConfig

from roundpipe_cli.costs.answering import DevicePlan, pass_s, plan_devices, weight_budget
from roundpipe_cli.costs.hardware import ASSUMED_DISK_BYTES_PER_S
from roundpipe_cli.costs.machine import cpu_devices, host_memory, slow_in_16_bit, this_machine
from roundpipe_cli.costs.nvidia_smi import visible_gpus
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.streaming import StreamedModel
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.events import Notice, Tell, tell_notices
from roundpipe_cli.heap import UnusedHeap, settle_heap
from roundpipe_cli.model.adapter_files import put_adapter, read_adapter_config, trained_tokens
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.meta_counts import figures_of_model
from roundpipe_cli.model.new_tokens import NewTokens
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.train.prepare.base_files import read_base_files
from roundpipe_cli.train.prepare.devices import choose_devices, make_backends
from roundpipe_cli.train.prepare.fill import fill_store
from roundpipe_cli.train.prepare.ready import DTYPES, Setup
from roundpipe_cli.train.prepare.setup import lay_out, make_weight_store, weight_formats
from roundpipe_cli.train.result.generate import (
    Prompt,
    ids_of_prompt,
    load_result,
    move_to_gpu,
    needs_streaming,
    tokenizer_of,
)
from roundpipe_cli.units import format_bytes

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
    longest: Prompt,
    batch_size: int,
    tell: Tell,
) -> Iterator[tuple[Any, Any, str | None]]:
    """The result's model, its tokenizer, and where it computes, unless the model's own device tells.

    Args:
        stream: layers fetch their weights; otherwise only where the whole model has no room.
        folder: for weights that host memory has no room for.
        cache_bytes: of each device's memory, for weights; None: what is free beside the answers' keys and values.
        longest: of the prompts, of which `batch_size` are answered together.

    Raises:
        RefusedError: it cannot be loaded, or cannot be cut into layers.
    """
    if not (stream or needs_streaming(source, dtype)):
        model, tokenizer = load_result(result, source, dtype, is_adapter=is_adapter)
        yield move_to_gpu(model, lambda text: tell(Notice(text))), tokenizer, None
        return
    settle_heap()
    tokenizer, devices = tokenizer_of(result, source, is_adapter=is_adapter), choose_devices("auto")[0]
    devices, start = tuple(dict.fromkeys(devices)), result if is_adapter else None
    file, on_host = result / "recipe.yaml", devices == ("cpu",)
    if on_host and (slow := slow_in_16_bit(dtype)) is not None:
        tell(Notice(f"{slow.partition(';')[0]}: streaming in float32"))
        dtype = "float32"
    recipe = Recipe(model=source.name, datasets=(), learning_rate=0.0, output_dir="")
    recipe = load_recipe(file).recipe if file.is_file() else recipe  # how the base lay packed in its run
    recipe = replace(recipe, output_dir=str(folder), weights="auto", method="lora")
    model, split, new = _skeleton(source, DTYPES[dtype], start)
    formats = weight_formats(source, recipe, tell)
    layouts, packed = lay_out(source, formats, model, split, dtype=dtype, trains=False, tell=tell)
    if on_host and cache_bytes is not None and cache_bytes < sum(layout.num_bytes for layout in layouts):
        recipe = replace(recipe, weights="mmap")
    store = make_weight_store(recipe, layouts, tell)
    if cache_bytes is None:
        cache_bytes = _budget(
            model, split, store, devices=devices, num_tokens=batch_size * _num_tokens(tokenizer, longest)
        )
    plans = _plans(store, devices, cache_bytes)
    tell_notices(tell, *_describe(plans, devices, is_mapped=store.is_mapped))
    kept = packed if formats[0] == formats[1] else ()
    fill_store(store, source, model, recipe, packed=kept, new=new, start=start, trains=False, tell=tell)
    UnusedHeap().give_back()
    pairs = list(zip(make_backends(devices, torch.get_num_threads()), plans, strict=True))
    with PageLocks(store, devices, "auto", tell), StreamedModel(model, split, store, pairs) as streamed:
        yield streamed.model, tokenizer, " and ".join(devices).replace("cpu", "the processor")


@contextlib.contextmanager
def answering(setup: Setup, num_tokens: int | None = None, devices: Sequence[str] | None = None) -> Iterator[Any]:
    """The model of a run as its weights are now, which answers as `generate` of transformers has it, streamed.

    Args:
        num_tokens: of all answers at once, with their prompts: devices keep what weights they have room for beside
            them; None: they have no room, as workers have theirs.
        devices: None: all of the run.
    """
    recipe, devices = setup.recipe, tuple(dict.fromkeys(devices or setup.devices))
    budget, parts = 0, (setup.model, setup.split, setup.store)
    if num_tokens is not None:
        budget = _budget(*parts, devices=devices, num_tokens=num_tokens)
    how = {"float16_accumulation": recipe.float16_accumulation, "deterministic": recipe.deterministic}
    backends = make_backends(devices, torch.get_num_threads(), **how)
    pairs = list(zip(backends, _plans(setup.store, devices, budget), strict=True))
    with StreamedModel(setup.model, setup.split, setup.store, pairs) as streamed:
        streamed.model.generation_config = GenerationConfig.from_dict(dict(setup.base_files.generation))
        yield streamed.model


def _plans(store: WeightStore, devices: Sequence[str], budget_bytes: int) -> list[DevicePlan]:
    """Layers of the devices, and what stays in `budget_bytes` each; processors read the host's memory in place."""
    if devices[0] == "cpu" and not store.is_mapped:
        budget_bytes = sys.maxsize
    return plan_devices([layout.num_bytes for layout in store.layouts], len(devices), budget_bytes)


def _budget(model: Any, split: ModelSplit, store: WeightStore, *, devices: Sequence[str], num_tokens: int) -> int:
    """Bytes of each device for weights, beside what is kept of so many tokens: keys and values, of which recurrent
    blocks keep less.

    Raises:
        ResourceError: these alone have no room.
    """
    config = model.config.get_text_config()
    figures = figures_of_model(config, model, split)
    heads = figures["num_attention_heads"]
    width = figures.get("head_dim") or figures["hidden_size"] // heads
    width *= 2 * (figures.get("num_key_value_heads") or heads)
    if rank := getattr(config, "kv_lora_rank", None):  # latent attention keeps its latents
        width = rank + config.qk_rope_head_dim
    free = [host_memory().available_bytes] if devices[0] == "cpu" else map(cuda.memory_bytes, range(len(devices)))
    answers = num_tokens * width * model.dtype.itemsize * -(-split.num_blocks // len(devices))
    whole, room = max(layout.whole_bytes for layout in store.layouts), min(free)
    if answers + whole > room:
        raise ResourceError(
            "no room for the keys and values of the answers",
            found=f"{format_bytes(answers)} for {num_tokens:,} tokens, {format_bytes(room)} free",
            hint="fewer prompts at once (--batch-size), or shorter answers (--max-new-tokens)",
        )
    return weight_budget(room, answers_bytes=answers, unpacked_bytes=whole)


def _num_tokens(tokenizer: Any, prompt: Prompt) -> int:
    return len(ids_of_prompt(tokenizer, prompt)) + prompt.max_new_tokens


def _skeleton(
    source: ModelSource, dtype: torch.dtype, adapter: Path | None
) -> tuple[Any, ModelSplit, NewTokens | None]:
    """The model without weights, with its adapter, where it is cut, and the adapter's tokens."""
    config = load_config(source)
    generation = read_base_files(source, config).generation
    model: Any = build_skeleton(config, dtype)
    if source.gguf_file is None:
        untie_stored(model, source.folder)
    split = split_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generation_config = GenerationConfig.from_dict(dict(generation))
    if adapter is None:
        return model, split, None
    model.requires_grad_(False)
    config = read_adapter_config(adapter)
    config.lora_dropout, config.inference_mode = 0.0, False  # adapters are told from what is packed
    known = len(model.get_input_embeddings().weight)
    new = NewTokens(known, {str(number): number for number in trained_tokens(config.trainable_token_indices)})
    put_adapter(model, config, adapter)
    return model, split, new


def _describe(plans: Sequence[DevicePlan], devices: Sequence[str], *, is_mapped: bool) -> Iterator[str]:
    """Notices on what stays, what comes past for each token, and how fast that is by the figures of this machine."""
    kept, passing = sum(plan.kept_bytes for plan in plans), sum(plan.passing_bytes for plan in plans)
    gpus = () if devices == ("cpu",) else visible_gpus()[0]
    machine = this_machine(gpus or cpu_devices(1), "", (), Path())
    links, memory = zip(
        *((device.link_bytes_per_s, device.memory_bytes_per_s) for device in machine.devices), strict=True
    )
    disk = (machine.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S) if is_mapped else None
    read_s = (kept + passing) / min(memory)
    seconds = pass_s(plans, read_s, link_bytes_per_s=min(links), disk_bytes_per_s=disk)
    where = "in host memory" if devices == ("cpu",) else f"on {', '.join(devices)}"
    past = f"{format_bytes(passing)} come past from {'disk' if is_mapped else 'host memory'} for each token"
    of_batch = f"{1 / seconds:.2g} tokens/s for a prompt, {BATCH / seconds:.2g} for a batch of {BATCH}"
    yield f"streaming: {format_bytes(kept)} of weights stay {where}, {past}: at most about {of_batch} (not measured)"
    if seconds > 1:
        yield f"below 1 token/s: a batch of {BATCH} prompts (--prompts FILE) takes the same pass as one prompt"
