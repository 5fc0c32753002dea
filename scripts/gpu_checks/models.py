"""Models of known shapes with random weights, made in memory: nothing is fetched and no recipe is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.find_model import figures_of
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.fused import FusedOps, find_fused_ops
from roundpipe_cli.model.layout import layer_parameters, make_layout
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import ModelSplit, split_model
from scripts.gpu_checks.place import CheckPlace

FAMILIES = {
    "llama": "meta-llama/Llama-3.1-8B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma3_text": "google/gemma-3-12b-pt",
    "gpt_oss": "openai/gpt-oss-20b",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
"""Model types, and whose shapes they have."""
SPEED_MODEL = "Qwen/Qwen3-1.7B"
_NOT_OF_CONFIG = ("parameters", "quantization_config", "model_type", "source", "counted")
SCALE = 0.02
"""Standard deviation of matrices."""


@dataclass(frozen=True)
class BuiltModel:
    """A model as the engine has it, and the figures of its configuration."""

    skeleton: nn.Module
    split: ModelSplit
    store: WeightStore
    figures: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return len(self.store.layouts)

    @property
    def fused(self) -> FusedOps:
        """The modules that compute by fused operators, as a recipe's default has it."""
        return find_fused_ops(self.skeleton, self.split)


def configuration(figures: Mapping[str, Any]) -> Any:
    """transformers' configuration of a model's figures, without dropout."""
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in figures.items() if key not in _NOT_OF_CONFIG}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONFIG_MAPPING[figures["model_type"]](**values)


def shipped(hub_id: str, **changes: Any) -> dict[str, Any]:
    """Figures of a model that comes with the tool."""
    found = figures_of(hub_id)
    assert found is not None, hub_id
    return {**found[0], **changes}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """Figures of a model of a few thousand parameters."""
    from tests.support.tiny import BASE, EXTRA, NO_DROPOUT

    return {**BASE, **NO_DROPOUT, **EXTRA[model_type], "model_type": model_type, "num_hidden_layers": 2, **changes}


def of_scale(place: CheckPlace, model_type: str, **changes: Any) -> dict[str, Any]:
    """One family at its real width, or tiny."""
    return shipped(FAMILIES[model_type], **changes) if place.scale == "full" else tiny(model_type, **changes)


def build(figures: dict[str, Any], method: str, dtype: torch.dtype = torch.bfloat16) -> BuiltModel:
    """The model with random weights in host memory."""
    skeleton = build_skeleton(configuration(figures), dtype)
    split = split_model(skeleton)
    if method == "lora":
        add_lora(skeleton, LoraSettings(r=16, alpha=16), dtype=dtype, base_name="random")
    layouts = [
        make_layout(name, parameters, dtype)
        for name, parameters in zip(split.layer_names(), layer_parameters(skeleton, split), strict=True)
    ]
    store = WeightStore(layouts)
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(2**16 + 1, generator=generator) * SCALE  # repeated: filling 16 GB anew would take minutes
    for place in (place for layout in layouts for place in layout.places):
        count = int(torch.Size(place.shape).numel())
        values = some.repeat(-(-count // some.numel()))[:count].reshape(place.shape)
        store.set_parameter(place.name, torch.ones(place.shape) if "norm" in place.name else values)
    return BuiltModel(skeleton, split, store, figures)


def random_rows(count: int, tokens: int, vocab_size: int) -> list[Microbatch]:
    """Microbatches of one row of random tokens, all trained."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, vocab_size, (1, tokens), generator=generator) for _ in range(count)]
    return [Microbatch(row, row.clone()) for row in ids]
