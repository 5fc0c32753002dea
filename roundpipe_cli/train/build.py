"""From a prepared model to its engine and its planner, for training and for `bench --run`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from roundpipe_cli.choices import OPTIMIZERS
from roundpipe_cli.costs.analytic import head_bytes, logits_at_once, teacher_bytes
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.hardware import ASSUMED_HOST_MEMORY_BYTES_PER_S
from roundpipe_cli.costs.machine import host_memory, num_cores, processor_name
from roundpipe_cli.costs.memory import (
    CONTEXT_BYTES,
    INPUTS_SHARE,
    backward_workspace_bytes,
    grows_segments,
    trained_head_bytes,
    without_gaps,
)
from roundpipe_cli.costs.models import ATTENTION_DROPOUT
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.prepared import trained_layers
from roundpipe_cli.engine.rough_costs import SHARED_BYTES_PER_S, AssumedDevice, LayerSizes, rough_costs
from roundpipe_cli.kernels.capability import all_run_ours, why_no_triton
from roundpipe_cli.model.attention import NAME, chunks_need_no_mask
from roundpipe_cli.model.lora import experts_per_token
from roundpipe_cli.planning.adaptive import AdaptivePlanner, ProfileCache
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.train.prepare.devices import gpu_index, make_backends, slowest_link_bytes_per_s, threads_per_worker
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import active_parameters

PROBE_PRODUCTS = 10**10
"""Weights times tokens of the longer of two sequences that a block is tried with, at most: a second for a desktop's
processor, and ten for a slow one. Sequences of some tens of tokens will do."""
MIN_PROBE_TOKENS = 32
HOST_SHARE = 0.5
"""Share of the free host memory, for the activations of all CPU workers together."""
ROUND_SHARE = 0.25
"""Share of the same, for the inputs of all layers of a round's microbatches. One microbatch per worker is always
allowed."""
WAITING_SHARE = 0.5
"""Share of what is free beside gradient sums and moments, for a shared head's gradients that wait for their turn."""
UNTOUCHED_BYTES = 12
"""Bytes of a trained parameter's sum and moments, which no step has written yet."""


def make_engine(setup: Setup, *, count_bytes: bool = False) -> Engine:
    """The engine of a run; not started yet. `count_bytes`: see `make_backends`."""
    recipe = setup.recipe
    num_threads = threads_per_worker(recipe.pipeline.threads_per_worker, len(setup.devices))
    skip = recipe.pipeline.skip_last_projection
    chunks = recipe.mlp_chunk_tokens
    unread = setup.probe.find_unread_products(in_chunks=chunks is not None) if skip or chunks else {}
    attends_in_rows = setup.attends_in_rows
    setup.probe.forget()
    return Engine(
        setup.model,
        setup.split,
        setup.store,
        make_backends(
            setup.devices,
            num_threads,
            float16_accumulation=recipe.float16_accumulation,
            deterministic=recipe.deterministic,
            count_bytes=count_bytes,
        ),
        options=EngineOptions(
            seed=recipe.seed,
            head_chunk_tokens=setup.head_chunk_tokens,
            mlp_chunk_tokens=chunks,
            fused=setup.fused,
            label_smoothing=recipe.label_smoothing_factor,
            own_loss=setup.loss,
            recompute=recipe.pipeline.recompute,
            unread=unread if skip else None,
            attends_in_rows=attends_in_rows,
            keep_blocks=_kept_blocks(recipe.pipeline, setup.split.num_blocks),
            keep_inputs=skip is True or _inputs_bytes(setup) <= INPUTS_SHARE * host_memory().available_bytes,
            whole_per_visit=setup.unpacks_once,
            weight_cache_bytes=weight_cache_bytes(recipe.pipeline),
            watchdog_s=recipe.watchdog_s or None,
        ),
    )


def _kept_blocks(pipeline: PipelineConfig, num_blocks: int) -> int:
    """Blocks whose activations are kept where they can be."""
    if pipeline.recompute == "none":
        return num_blocks
    return 0 if pipeline.keep_activations == "auto" else min(pipeline.keep_activations, num_blocks)


def weight_cache_bytes(pipeline: PipelineConfig) -> int:
    """Bytes of each GPU's memory for weights that stay on it."""
    return 0 if pipeline.weight_cache == "auto" else pipeline.weight_cache


def _inputs_bytes(setup: Setup) -> int:
    """Host bytes of the boundary tensors at the input of every layer, of a step's rows at their longest."""
    layouts, tokens = setup.store.layouts, setup.recipe.rows_per_step * int(setup.dataset.rows.lengths.max())
    return len(layouts) * tokens * setup.split.boundary_columns * layouts[0].trainable_dtype.itemsize


def make_planner(setup: Setup) -> AdaptivePlanner:
    """The planner of a run, with rough costs until the first steps were timed."""
    recipe = setup.recipe
    layouts = setup.store.layouts
    on_gpu = setup.devices[0] != "cpu"
    config: Any = setup.model.config
    if on_gpu:
        memory = min(cuda.memory_bytes(gpu_index(name)) // setup.devices.count(name) for name in setup.devices)
        if not all(grows_segments(cuda.device_name(gpu_index(name))) for name in setup.devices):
            memory = without_gaps(memory, recipe.method)
        memory = max(0, memory - weight_cache_bytes(recipe.pipeline))
    else:
        memory = int(HOST_SHARE * host_memory().available_bytes / len(setup.devices))
    form = _microbatch_form(setup, longest=on_gpu)
    text_config = config.get_text_config()
    active = active_parameters(setup.model, list(layouts))
    activation_bytes, shared_bytes = _memory_parts(setup, _microbatch_form(setup, longest=True), active[1:-1])
    experts = max(1, experts_per_token(text_config))
    tied = len(layouts) - 1 in trained_layers(setup.store, setup.split).late
    columns = setup.split.boundary_columns
    sizes = LayerSizes(layouts, active, columns, experts, activation_bytes, setup.unpacks_once, tied)
    link_bytes_per_s = slowest_link_bytes_per_s(setup.devices) if on_gpu else SHARED_BYTES_PER_S
    host_bytes_per_s = ASSUMED_HOST_MEMORY_BYTES_PER_S if on_gpu else None
    update_bytes = OPTIMIZERS[recipe.optim].update_bytes
    device = AssumedDevice("cuda" if on_gpu else "cpu", memory, link_bytes_per_s, host_bytes_per_s, update_bytes)
    costs = rough_costs(sizes, device, method=recipe.method, tokens=form.tokens)
    untouched = UNTOUCHED_BYTES * sum(layout.num_trainable_elements for layout in layouts)
    waiting_bytes = max(0, int(WAITING_SHARE * (host_memory().available_bytes - untouched)))
    room = int(ROUND_SHARE * host_memory().available_bytes / sum(layer.boundary_bytes for layer in costs.layers))
    return AdaptivePlanner(
        costs,
        len(setup.devices),
        recipe.pipeline,
        _profile_cache(setup, costs),
        microbatches_per_round=max(room, len(setup.devices), recipe.pipeline.num_chunks),
        weights_stay=not on_gpu and recipe.may_hold_all_weights,
        shared_bytes=shared_bytes,
        waiting_bytes=waiting_bytes,
        head_gradient_bytes=trained_head_bytes(
            layouts[-1].num_trainable_elements if on_gpu else 0,
            layouts[0].trainable_dtype.itemsize,
            in_chunks=form.tokens > setup.head_chunk_tokens,
        ),
    )


@dataclass(frozen=True)
class _Form:
    """Shape of a microbatch."""

    rows: int
    row_tokens: int
    """Tokens of a row; of a chunk, where sequences are cut."""
    context: int
    """Tokens of the whole sequence."""

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


def _microbatch_form(setup: Setup, *, longest: bool) -> _Form:
    recipe = setup.recipe
    lengths = setup.dataset.rows.lengths
    tokens = int(lengths.max()) if longest else max(1, int(lengths.mean()))
    context = recipe.row_tokens if recipe.packs else tokens
    rows = recipe.rows_per_microbatch
    if recipe.token_budget is not None:  # as many rows as fill it
        rows = min(recipe.rows_per_step, rows * recipe.row_tokens // context)
    return _Form(rows * len(recipe.objective_kind.rows.sides), max(1, context // recipe.pipeline.num_chunks), context)


def _memory_parts(setup: Setup, form: _Form, active: Sequence[int]) -> tuple[list[int] | None, int]:
    """Parts of a device's memory, as `plan` counts them.

    Args:
        active: of each block, weights that take part for one token.

    Returns:
        bytes of each layer's activations for one microbatch, as a block of each kind has them (None: not known), and
        bytes that all stages need beside them.
    """
    recipe, config = setup.recipe, setup.model.config
    text_config: Any = config.get_text_config()  # type: ignore[operator,union-attr]
    size, hidden = setup.store.layouts[0].trainable_dtype.itemsize, text_config.hidden_size
    in_place = setup.fused is not None and setup.loss is None and why_no_triton() is None
    in_place = in_place and setup.teacher is None and not recipe.scores_answers and "cpu" not in setup.devices
    in_place = in_place and all_run_ours(map(cuda.nvidia_capability, setup.devices))
    head = teacher_bytes(form.tokens, 0 if setup.teacher is None else setup.teacher.header["top_k"]) + head_bytes(
        form.tokens,
        setup.head_chunk_tokens,
        text_config.vocab_size,
        hidden,
        size=size,
        at_once=logits_at_once(text_config.model_type) if in_place else None,
    )
    widths = (getattr(text_config, name, None) for name in ("moe_intermediate_size", "intermediate_size"))
    width = next(filter(None, widths), 4 * hidden) * max(1, experts_per_token(text_config))
    mlp_tokens = min(form.tokens, recipe.mlp_chunk_tokens or form.tokens)
    boundary = form.tokens * setup.split.boundary_columns * size
    workspace = backward_workspace_bytes(form.tokens, mlp_tokens, width, hidden, size=size)
    shared = max(head, workspace) + 4 * boundary
    if not setup.unpacks_once:
        shared += max(layout.whole_bytes for layout in setup.store.layouts)
    if setup.devices[0] != "cpu":
        shared += CONTEXT_BYTES
    find = functools.partial(
        setup.probe.find_saved_bytes,
        attends_in_rows=setup.attends_in_rows,
        longest=min(form.context, max(MIN_PROBE_TOKENS, PROBE_PRODUCTS // max(active))),
        packed=recipe.packs,
    )
    whole = find()
    if whole is None:
        return None, shared
    saved = whole
    if mlp_tokens < form.tokens:
        saved = find(mlp_tokens) or whole
        shared += max(int(mlp_tokens * (a.per_token - b.per_token)) for a, b in zip(whole, saved, strict=True))
    blocks = [one.of(form.rows, form.row_tokens, form.context) for one in saved]
    buffers = [0] * len(blocks)
    if recipe.pipeline.num_chunks > 1:
        found = [_chunk_parts(setup, form, *pair) for pair in setup.probe.find_chunk_pairs()]
        buffers = [waiting for waiting, _ in found]
        blocks = [one + kept for one, (_, kept) in zip(blocks, found, strict=True)]
    if recipe.pipeline.recompute == "layer":  # the inputs, and one block whole
        shared += max(blocks)
        blocks = [boundary] * len(blocks)
    return [0, *map(sum, zip(blocks, buffers, strict=True)), head], shared


def _chunk_parts(setup: Setup, form: _Form, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
    """Bytes of a block's keys and values of a sequence with their gradients, and of what attention of a chunk keeps."""
    size = keys.element_size()
    config: Any = setup.model.config
    if keys.dim() < 4:  # states, of which each chunk has its own
        count = form.rows * setup.recipe.pipeline.num_chunks * (keys.numel() + values.numel())
        return count * (size + 4), 0
    width = keys.shape[-1] + values.shape[-1]
    tokens, key_heads = form.rows * form.context, keys.shape[1]
    buffers = tokens * key_heads * width * (size + 4)
    drops = any(getattr(config.get_text_config(), name, None) for name in ATTENTION_DROPOUT)
    is_plain = setup.attends_in_rows and config._attn_implementation == NAME and not drops
    if is_plain and chunks_need_no_mask(keys, values):
        return buffers, size * tokens * key_heads * width
    heads: int = config.get_text_config().num_attention_heads
    return buffers, size * (tokens * heads * width + form.tokens * form.context)


TIMED_BY = ("dtype", "float16_accumulation", "deterministic", "mlp_chunk_tokens", "kernels", "packed_as")
"""Keys of a recipe that layer times depend on."""


def _profile_cache(setup: Setup, costs: CostModel) -> ProfileCache:
    """Cache of times measured before, keyed by the devices and all of model and recipe that layer times depend on."""
    recipe = setup.recipe
    if setup.devices[0] == "cpu":
        num_threads = threads_per_worker(recipe.pipeline.threads_per_worker, len(setup.devices))
        devices = [f"{processor_name()}, {num_cores()} cores, {num_threads} threads"] * len(setup.devices)
    else:
        devices = [cuda.describe_device(gpu_index(name)) for name in setup.devices]
    config: Any = setup.model.config
    return ProfileCache(
        {
            "devices": devices,
            "torch": torch.__version__,
            "model": config.model_type,
            "layers": [[layer.name, layer.forward_s, layer.backward_s, layer.boundary_bytes] for layer in costs.layers],
            "bytes": [[layout.num_bytes, layout.num_trainable_elements] for layout in setup.store.layouts],
            "lora": asdict(recipe.lora) if recipe.method == "lora" else None,
            "micro_batch_size": recipe.rows_per_microbatch,
            "micro_batch_tokens": recipe.token_budget,
            "head_chunk_tokens": setup.head_chunk_tokens,
            "sequence_chunks": recipe.pipeline.num_chunks,
            "unpacks_once": setup.unpacks_once,
            **{key: getattr(recipe, key) for key in TIMED_BY},
            **{key: getattr(recipe.pipeline, key) for key in ("recompute", "skip_last_projection", "keep_activations")},
        }
    )
