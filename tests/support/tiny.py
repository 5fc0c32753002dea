"""Tiny models of many architectures, and the plain PyTorch loop that the engine must agree with."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.rough_costs import AssumedDevice, LayerSizes, rough_costs
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.attention import SINKS_NAME
from roundpipe_cli.model.dropout import layer_seed
from roundpipe_cli.model.fused import FusedOps, find_fused_ops
from roundpipe_cli.model.layout import layer_parameters, make_layout
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora, initial_values
from roundpipe_cli.model.reference import seeded_layers
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.model.stored.packed_weights import dequantize, quantizable_names
from roundpipe_cli.schedule.actions import Schedule
from tests.support.published import published
from tests.support.schedules import dealt

BASE = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 4}
_HEAD = {"head_dim": 16}
EXTRA: dict[str, dict[str, Any]] = {
    **{"llama": {}, "qwen2": {}, "qwen3": _HEAD},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_next": {
        **{**_MOE, **_HEAD, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    **{"mistral": _WINDOW, "mixtral": {"num_local_experts": 4}, "gemma": _HEAD},
    **{"gemma2": {**_HEAD, **_WINDOW}, "gemma3_text": {**_HEAD, **_WINDOW}, "phi": {}, "phi3": {}},
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, **_HEAD, **_WINDOW},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    **{"olmo2": {}, "olmo3": _WINDOW, "granite": {}, "starcoder2": {}, "stablelm": {}, "gpt_neox": {}},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "glm4": _HEAD,
    "glm4_moe": {
        **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, **_HEAD},
    },
    "cohere2": _WINDOW,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    **{"smollm3": {}, "exaone4": _WINDOW, "ernie4_5": _HEAD},
    "minimax": {
        **{"num_local_experts": 4, **_HEAD, "num_experts_per_tok": 2},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    **{"nemotron": {}, "seed_oss": {}},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
    "bloom": {"n_layer": 3, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128},
    "hunyuan_v1_dense": _HEAD,
}
ALIKE = frozenset(
    {
        *("qwen2", "qwen2_moe", "mistral", "gemma", "olmo3", "granite", "smollm3", "exaone4", "ernie4_5", "seed_oss"),
        "hunyuan_v1_dense",
    }
)
"""Types with little in their blocks that none of the others has: what tries every type leaves them to `-m sweep`."""
NO_DROPOUT = {
    **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **{"dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A configuration of a few thousand parameters; no dropout unless asked for."""
    from transformers import CONFIG_MAPPING

    values = {**BASE, **NO_DROPOUT, **EXTRA.get(model_type, {}), **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[model_type](**values)


@dataclass
class Rig:
    """A tiny model both ways: as the engine has it and as a plain module with the same weights."""

    skeleton: nn.Module
    split: ModelSplit
    store: WeightStore
    plain: nn.Module
    peft_model: Any = None
    kernels: str = "reference"  # as in the recipe

    @property
    def fused(self) -> FusedOps | None:
        """The modules that compute by fused operators."""
        return find_fused_ops(self.skeleton, self.split) if self.kernels == "auto" else None

    @property
    def num_layers(self) -> int:
        return len(self.store.layouts)

    def engine(self, num_workers: int = 2, copy: bool = False, count_bytes: bool = False, **options: Any) -> Engine:
        backends = [CpuBackend(1, copy=copy, count_bytes=count_bytes) for _ in range(num_workers)]
        return Engine(
            self.skeleton, self.split, self.store, backends, options=EngineOptions(fused=self.fused, **options)
        )


def make_rig(
    model_type: str,
    method: str = "full",
    seed: int = 0,
    lora_dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    frozen: Sequence[str] = (),
    packed_as: PackedName | None = None,
    lora_rank: int = 4,
    kernels: str = "reference",
    config: Any = None,
    **changes: Any,
) -> Rig:
    """Build a tiny model with random weights; LoRA's B matrices are random too, so that every gradient is.
    `frozen`: parts of names that are not trained; `packed_as`: the plain module has the unpacked weights."""
    torch.set_num_threads(1)  # in the test's own thread; the workers set their own
    config = config or tiny_config(model_type, **changes)
    skeleton = build_skeleton(config, dtype)
    split = split_model(skeleton)
    peft_model = None
    for name, parameter in skeleton.named_parameters():
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    if method == "lora":
        settings = LoraSettings(r=lora_rank, alpha=8, dropout=lora_dropout)
        peft_model = add_lora(skeleton, settings, dtype=dtype, base_name="tiny", blocks_path=split.blocks_path)
    packed = quantizable_names(skeleton, split.blocks_path) if packed_as else frozenset()
    store = make_store(skeleton, split, dtype, packed, packed_as=packed_as)
    generator = torch.Generator().manual_seed(seed)
    for place in (place for layout in store.layouts for place in layout.places):
        shape, name = place.shape, place.name
        scale = 0.5 / max(shape[-1], 1) ** 0.5 if len(shape) > 1 else 0.1
        values = torch.randn(shape, generator=generator) * scale
        if place.packed_as is not None and PACKED_FORMATS[place.packed_as].is_published:
            store.set_packed(name, published(values.to(dtype), place.packed_as))
            continue
        store.set_parameter(name, values + 1 if len(shape) == 1 and "norm" in name else values)
    if method == "lora":
        for name, values in initial_values(skeleton, seed, store.master):
            if ".lora_A." in name:
                store.set_parameter(name, values)
    return Rig(skeleton, split, store, plain_copy(skeleton, store), peft_model, kernels)


def make_store(
    model: nn.Module,
    split: ModelSplit,
    dtype: torch.dtype,
    packed: Collection[str] = (),
    *,
    packed_as: PackedName | None = None,
) -> WeightStore:
    """A store for the model's weights, which has none yet."""
    parameters = zip(split.layer_names(), layer_parameters(model, split), strict=True)
    return WeightStore([make_layout(name, some, dtype, packed, packed_as=packed_as) for name, some in parameters])


def plain_copy(skeleton: nn.Module, store: WeightStore) -> nn.Module:
    """An ordinary module with the store's weights, nothing shared."""
    plain = copy.deepcopy(skeleton)
    config: Any = plain.config
    if config._attn_implementation == SINKS_NAME:
        config._attn_implementation = "eager"  # transformers' own
    places = {place.name: place for layout in store.layouts for place in layout.places}
    real: dict[str, nn.Parameter] = {}
    names = {id(p): name for name, p in plain.named_parameters()}
    for module in plain.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None:
                name = names[id(parameter)]
                if name not in real:
                    place, values = places[name], store.master(name).clone()
                    if place.packed_as:
                        values = dequantize(values, place.shape, place.dtype, place.packed_as)
                    real[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[attribute] = real[name]
    return plain.train()


def random_microbatches(sizes: Sequence[tuple[int, int]], seed: int = 0, vocab: int = 128) -> list[Microbatch]:
    """Microbatches of the given (rows, tokens), labels partly masked, right padding on the second row."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for rows, tokens in sizes:
        ids = torch.randint(3, vocab, (rows, tokens), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < 0.3] = -100
        if rows > 1:
            ids[1, -3:] = 0
            labels[1, -3:] = -100
        result.append(Microbatch(ids, labels))
    return result


def plain_step(
    rig: Rig, microbatches: Sequence[Microbatch], step: int = 0, seed: int | None = None, plain: nn.Module | None = None
) -> float:
    """Loss of one step by plain PyTorch; gradients stay in `.grad`. With `seed`, the engine's dropout masks."""
    plain = plain or rig.plain
    plain.zero_grad(set_to_none=True)
    num_targets = sum(int((m.labels[:, 1:] != -100).sum()) for m in microbatches)
    total = 0.0
    for index, microbatch in enumerate(microbatches):
        with masks(rig, plain, step, index, seed):
            logits = plain(input_ids=microbatch.input_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), microbatch.labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / num_targets).backward()
        total += float(loss.detach().double())
    return total / num_targets


def masks(rig: Rig, plain: nn.Module, step: int, microbatch: int, seed: int | None) -> AbstractContextManager[object]:
    """While entered, a forward of `plain` drops as the engine does; nothing without a seed."""
    if seed is None:
        return nullcontext()
    blocks = plain.get_submodule(rig.split.blocks_path)
    return seeded_layers(blocks, functools.partial(layer_seed, seed, step, microbatch))


def schedule_for(rig: Rig, workers: int, microbatches: int, forward: Any = None, backward: Any = None) -> Schedule:
    """A roundpipe schedule; by default two layers a forward stage, one a backward stage, the head alone."""
    last = rig.num_layers - 1
    forward = forward or [(start, min(start + 1, last - 1)) for start in range(0, last, 2)]
    backward = backward or [(last, last), *((layer, layer) for layer in range(last - 1, 0, -1)), (0, 0)]
    return dealt(forward, backward, workers, microbatches)


def step_of_any_workers(rig: Rig, microbatches: Sequence[Microbatch], **options: Any) -> StepResult:
    """The result of a step on one worker, and with the same bits on two that copy."""
    results = []
    for num_workers, copies in ((1, False), (2, True)):
        with rig.engine(num_workers, copy=copies, **options) as engine:
            schedule = schedule_for(rig, num_workers, len(microbatches))
            results.append(engine.run_step(microbatches, schedule, step=0))
    one, two = results
    assert (one.loss, one.gradient_norm) == (two.loss, two.gradient_norm), "the bits depend on the number of workers"
    return two


def check_step(rig: Rig, expected: float, step: Callable[..., tuple[str, list[torch.Tensor]]]) -> None:
    """`step`, by some number of workers, has this loss and the gradients that `rig.plain` has; others have its bits."""
    loss, gradients = step()
    assert float.fromhex(loss) == pytest.approx(expected, rel=1e-6)
    plain = {name: p.grad for name, p in rig.plain.named_parameters() if p.requires_grad}
    assert plain
    apart = [float((rig.store.gradient(name) - gradient).norm()) for name, gradient in plain.items()]
    assert math.hypot(*apart) <= 1e-5 * math.hypot(*(float(gradient.norm()) for gradient in plain.values()))
    for num_workers, copies in ((1, False), (3, True)):
        again, same = step(num_workers, copy=copies)
        assert again == loss and all(torch.equal(*pair) for pair in zip(same, gradients, strict=True))


def write_new_weights(rig: Rig) -> None:
    """Something new in every trained weight, made from the gradient, as an optimizer would write it."""
    for layer, layout in enumerate(rig.store.layouts):
        if layout.num_trainable_elements:
            with rig.store.next_version(layer) as place:
                place.masters.add_(rig.store.gradients[layer], alpha=-0.01)
                if place.weights is not None:
                    place.weights.copy_(place.masters)


def gpu_costs(rig: Rig, memory_bytes: int) -> CostModel:
    """Rough costs of a LoRA run of microbatches of 18 tokens, on devices of so much memory and links without end."""
    sizes = LayerSizes(rig.store.layouts, [layout.num_bytes // 4 for layout in rig.store.layouts], boundary_columns=64)
    rough = rough_costs(sizes, AssumedDevice("cuda", memory_bytes), method="lora", tokens=18)
    return replace(rough, link_bytes_per_s=1e15)


def logits_of(model: Any) -> torch.Tensor:
    """Logits of two rows of made-up tokens."""
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.arange(3, 43).reshape(2, 20), use_cache=False).logits
        return logits
