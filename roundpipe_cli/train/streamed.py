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

from roundpipe_cli.costs.hardware import ASSUMED_DISK_BYTES_PER_S
from roundpipe_cli.costs.machine import cpu_devices, host_memory, this_machine
from roundpipe_cli.costs.nvidia_smi import visible_gpus
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.streaming import DevicePlan, StreamedModel, plan_devices
from roundpipe_cli.events import Notice, Tell, tell_notices
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
from roundpipe_cli.train.prepare.base_files import GENERATION_CONFIG
from roundpipe_cli.train.prepare.devices import choose_devices, make_backends
from roundpipe_cli.train.prepare.fill import fill_store
from roundpipe_cli.train.prepare.ready import DTYPES
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

WEIGHTS_SHARE = 0.8
"""Share of a device's free memory for weights, without the answers' keys and values, beside activations."""
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
    tokenizer, devices = tokenizer_of(result, source, is_adapter=is_adapter), choose_devices("auto")[0]
    devices, start = tuple(dict.fromkeys(devices)), result if is_adapter else None
    file, on_host = result / "recipe.yaml", devices == ("cpu",)
    recipe = Recipe(model=source.name, datasets=(), learning_rate=0.0, output_dir="")
    recipe = load_recipe(file).recipe if file.is_file() else recipe  # how the base lay packed in its run
    recipe = replace(recipe, output_dir=str(folder), weights="auto", method="lora")
    model, split, answering, new, width = _skeleton(source, DTYPES[dtype], start)
    formats = weight_formats(source, recipe, tell)
    layouts, packed = lay_out(source, formats, model, split, dtype=dtype, trains=False, tell=tell)
    if on_host and cache_bytes is not None and cache_bytes < sum(layout.num_bytes for layout in layouts):
        recipe = replace(recipe, weights="mmap")
    store = make_weight_store(recipe, layouts, tell)
    if cache_bytes is None:
        free = [host_memory().available_bytes] if on_host else map(cuda.memory_bytes, range(len(devices)))
        num_tokens = batch_size * (len(ids_of_prompt(tokenizer, longest)) + longest.max_new_tokens)
        answers = num_tokens * width * DTYPES[dtype].itemsize * -(-(len(layouts) - 2) // len(devices))
        whole = max(layout.whole_bytes for layout in layouts)
        cache_bytes = max(0, int(WEIGHTS_SHARE * (min(free) - answers)) - whole)
    plans = plan_devices(layouts, len(devices), cache_bytes if store.is_mapped or not on_host else sys.maxsize)
    tell_notices(tell, *_describe(plans, devices, is_mapped=store.is_mapped))
    kept = packed if formats[0] == formats[1] else ()
    fill_store(store, source, model, recipe, packed=kept, new=new, start=start, trains=False, tell=tell)
    pairs = list(zip(make_backends(devices, torch.get_num_threads()), plans, strict=True))
    with PageLocks(store, devices, "auto", tell), StreamedModel(model, split, store, pairs):
        yield answering.eval(), tokenizer, " and ".join(devices).replace("cpu", "the processor")


def _skeleton(
    source: ModelSource, dtype: torch.dtype, adapter: Path | None
) -> tuple[Any, ModelSplit, Any, NewTokens | None, int]:
    """The model without weights, where it is cut, what answers (PEFT's, with an adapter), the adapter's tokens, and
    how many numbers a block keeps of a token: keys and values, of which recurrent blocks keep less."""
    from transformers import GenerationConfig

    model: Any = build_skeleton(load_config(source), dtype)
    if source.gguf_file is None:
        untie_stored(model, source.folder)
    split = split_model(model)
    figures = figures_of_model(model.config.get_text_config(), model, split)
    heads = figures["num_attention_heads"]
    width = figures.get("head_dim") or figures["hidden_size"] // heads
    width *= 2 * (figures.get("num_key_value_heads") or heads)
    if rank := getattr(model.config.get_text_config(), "kv_lora_rank", None):  # latent attention keeps its latents
        width = rank + model.config.get_text_config().qk_rope_head_dim
    for name in ("config.json", GENERATION_CONFIG):  # as transformers gives them to a model that it loads
        with contextlib.suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            of_model: dict[str, Any] = {"local_files_only": True, "_from_model_config": name == "config.json"}
            model.generation_config = GenerationConfig.from_pretrained(str(source.folder), name, **of_model)
    if adapter is None:
        return model, split, model, None, width
    model.requires_grad_(False)
    config = read_adapter_config(adapter)
    config.lora_dropout, config.inference_mode = 0.0, False  # adapters are told from what is packed
    known = len(model.get_input_embeddings().weight)
    new = NewTokens(known, {str(number): number for number in trained_tokens(config.trainable_token_indices)})
    return model, split, put_adapter(model, config, adapter), new, width


def _describe(plans: Sequence[DevicePlan], devices: Sequence[str], *, is_mapped: bool) -> Iterator[str]:
    """Notices on what stays, what comes past for each token, and how fast that is by the figures of this machine."""
    kept = sum(plan.sizes[layer] for plan in plans for layer in plan.kept)
    passing = sum(sum(plan.sizes.values()) for plan in plans) - kept
    gpus = () if devices == ("cpu",) else visible_gpus()[0]
    machine = this_machine(gpus or cpu_devices(1), "", (), Path())
    links = [device.link_bytes_per_s for device in machine.devices]
    if is_mapped:
        links.append(machine.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S)
    seconds = kept / min(device.memory_bytes_per_s for device in machine.devices) + passing / min(links)
    where = "in host memory" if devices == ("cpu",) else f"on {', '.join(devices)}"
    past = f"{format_bytes(passing)} come past from {'disk' if is_mapped else 'host memory'} for each token"
    of_batch = f"{1 / seconds:.2g} tokens/s for a prompt, {BATCH / seconds:.2g} for a batch of {BATCH}"
    yield f"streaming: {format_bytes(kept)} of weights stay {where}, {past}: at most about {of_batch} (not measured)"
    if seconds > 1:
        yield f"below 1 token/s: a batch of {BATCH} prompts (--prompts FILE) takes the same pass as one prompt"
