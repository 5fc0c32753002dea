"""Adapters by PEFT with random weights, and models as their users load them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from tests.support.tiny import logits_of

import_bitsandbytes()  # or PEFT does, with a compiler, which takes a second
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def load_whole(folder: Path, kind: str = "", **options: Any) -> Any:
    """A model in float32 by the class `kind`, or the one that its config.json names, every tensor in its place."""
    kind = kind or json.loads((folder / "config.json").read_text())["architectures"][0]
    options = {"dtype": torch.float32, "output_loading_info": True, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = getattr(transformers, kind).from_pretrained(str(folder), **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def layout(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of the tensors of a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the handle is no mapping
                view = file.get_slice(key)
                found[key] = (view.get_dtype(), tuple(view.get_shape()))
    return found


def random_adapter(base: Path, folder: Path, *, save_tables: bool = False, **options: Any) -> Any:
    """An adapter of queries, unless `options` say otherwise, by PEFT itself; returns its model."""
    torch.manual_seed(5)
    usual = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    config = LoraConfig(**{**usual, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_whole(base), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name or (parameter.requires_grad and "lora_" not in name):
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(str(folder), save_embedding_layers=save_tables or "auto")
    return model


def by_peft(base: Any, adapter: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits_of(PeftModel.from_pretrained(base, str(adapter)))
