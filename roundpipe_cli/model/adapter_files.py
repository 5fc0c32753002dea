"""A LoRA adapter in PEFT's format, read: its configuration, and its tensors by the names of a model's parameters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.adapter_checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_adapter_folder,
    check_patterns,
)
from roundpipe_cli.model.library_calls import refusing
from roundpipe_cli.model.packed_weights import import_bitsandbytes
from roundpipe_cli.model.stored.names import is_adapter
from roundpipe_cli.model.stored.tensors import open_shard

PEFT_PREFIX = "base_model.model."


def read_adapter_config(folder: Path) -> Any:
    """PEFT's LoraConfig.

    Raises:
        RefusedError: it cannot be read, is not safe to open, or is of another kind of adapter.
    """
    check_adapter_folder(folder)
    import_bitsandbytes()
    from peft import LoraConfig, PeftConfig

    with refusing("the adapter's configuration cannot be read", str(folder / ADAPTER_CONFIG)):
        config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig) or config.bias != "none":
        raise RefusedError(
            "only LoRA adapters without trained biases can be read",
            where=str(folder / ADAPTER_CONFIG),
            found=f"{config.peft_type}, bias {getattr(config, 'bias', None)}",
        )
    return config


def put_adapter(model: nn.Module, config: Any, folder: Path) -> Any:
    """Put the adapter's modules into the skeleton `model`; returns PEFT's model around it.

    Raises:
        RefusedError: it does not fit the model.
    """
    from peft import get_peft_model

    check_patterns(config, (name for name, _ in model.named_modules()), folder)
    with refusing("the adapter does not fit the base model", str(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)  # type: ignore[arg-type]


def read_adapter_tensors(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors by parameter name of `model`, which has the adapter's modules.

    Raises:
        RefusedError: they are not the adapter's of this model.
    """
    modules = dict(model.named_modules())
    tensors: dict[str, torch.Tensor] = {}
    with open_shard(folder / ADAPTER_WEIGHTS) as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            tensors[_parameter_name(key, modules)] = file.get_tensor(key)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise RefusedError(
            "the adapter does not fit the base model",
            where=str(folder / ADAPTER_WEIGHTS),
            found=f"{len(different)} tensors missing, unexpected or of another shape, for instance {different[0]}",
        )
    return tensors


def _parameter_name(key: str, modules: dict[str, nn.Module]) -> str:
    """PEFT's files leave the adapter's name out of the names of parameters."""
    name = key.removeprefix(PEFT_PREFIX)
    path, _, attribute = name.rpartition(".")
    if hasattr(modules.get(path), "modules_to_save"):
        return f"{path}.modules_to_save.default.{attribute}"
    for part in (".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B"):
        name = name.replace(f"{part}.weight", f"{part}.default.weight")
    if name.endswith(".lora_magnitude_vector"):
        return f"{name}.default.weight"
    return name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector.default.weight")
