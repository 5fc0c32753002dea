"""A LoRA adapter in PEFT's format, read: its configuration, and its tensors by the names of a model's parameters."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.adapter_checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGE_HINT,
    base_start,
    check_adapter_folder,
    check_patterns,
)
from roundpipe_cli.model.library_calls import refusing
from roundpipe_cli.model.packed_weights import import_bitsandbytes
from roundpipe_cli.model.stored.names import base_name, is_adapter, tied_names
from roundpipe_cli.model.stored.tensors import open_shard

PEFT_PREFIX = "base_model.model."


def read_adapter_config(folder: Path) -> Any:
    """PEFT's LoraConfig.

    Raises:
        RefusedError: it cannot be read, is not safe to open, is of another kind of adapter, or of a start whose base
            weights cannot be made again.
    """
    base_start(check_adapter_folder(folder), folder)  # PEFT's own errors do not say what to do
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

    if getattr(config, "kasa_config", None):
        raise RefusedError(
            "KaSA changes the base weights and trains a diagonal between an adapter's matrices, which is not supported",
            where=str(folder / ADAPTER_CONFIG),
            found="kasa_config",
            hint=MERGE_HINT,
        )
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


class StartedBase:
    """The base weights of adapted modules as PEFT's own start of an adapter leaves them."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """
        Args:
            model: with the adapter's modules.
            folder: of the adapter.
        """
        self._start = base_start(check_adapter_folder(folder), folder)
        self._folder = folder
        self._wrappers: dict[str, Any] = {}
        if self._start is not None:
            wrapped = ((path, module) for path, module in model.named_modules() if hasattr(module, "lora_A"))
            self._wrappers = {f"{path}.base_layer.weight": module for path, module in wrapped}
            own = {base_name(name) for name in self._wrappers}
            shared = [name for name in tied_names(model) if base_name(name) in own]
            if shared:
                raise RefusedError(
                    f"this adapter began by {self._start} on a table that embedding and LM head share",
                    where=str(folder),
                    found=shared[0],
                    hint=MERGE_HINT,
                )

    @property
    def names(self) -> Collection[str]:
        """Parameters of the model that the start changes."""
        return self._wrappers.keys()

    def refuse_packed(self, name: str) -> None:
        """
        Raises:
            RefusedError: the start changes this parameter, which lies in the base's files in 4 bit.
        """
        if name in self._wrappers:
            raise RefusedError(
                f"this adapter began by {self._start}, which changes base weights, and these are in 4 bit",
                where=str(self._folder),
                found=name,
                expected="a base whose files hold it in 16 or 32 bit",
            )

    def weight(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A base weight after the start, in the model's type; the weight itself where it changes nothing.

        Raises:
            RefusedError: PEFT cannot start on it.
        """
        wrapper = self._wrappers.get(name)
        if wrapper is None:
            return values
        layers = (wrapper.get_base_layer(), *(part["default"] for part in (wrapper.lora_A, wrapper.lora_B)))
        held = [layer._parameters["weight"] for layer in layers]
        try:
            own = values.to(held[0].dtype, copy=True)
            for layer, value in zip(layers, (own, torch.empty(0), torch.empty(0)), strict=True):
                layer._parameters["weight"] = nn.Parameter(value, requires_grad=False)
            with refusing(f"PEFT cannot start this adapter by {self._start}", str(self._folder)), torch.no_grad():
                if self._start == "pissa":
                    wrapper.pissa_init("default", "pissa")
                else:
                    wrapper.olora_init("default")
            return torch.as_tensor(layers[0]._parameters["weight"]).detach()
        finally:
            for layer, parameter in zip(layers, held, strict=True):
                layer._parameters["weight"] = parameter


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
