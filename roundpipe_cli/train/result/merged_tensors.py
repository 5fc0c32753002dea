"""The tensors of a base model with an adapter merged into it, made one module at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.model.adapter_files import (
    ADAPTER_CONFIG,
    StartedBase,
    put_adapter,
    read_adapter_config,
    read_adapter_tensors,
)
from roundpipe_cli.model.stored.quantized_files import is_nf4
from roundpipe_cli.model.stored.tensors import OpenFiles, base_name, check_finite, is_adapter, tied_names
from roundpipe_cli.model.weights_io import BaseWeights, WeightGroup
from roundpipe_cli.train.checkpoint.safetensors_stream import TensorSpec


class MergedTensors:
    """The tensors of the result on demand: the base's, those of adapted modules with the adapter added."""

    def __init__(self, model: nn.Module, base: BaseWeights, result: Path, dtype: torch.dtype | None) -> None:
        """
        Args:
            model: the base model's skeleton; gets the adapter's modules.
            result: a folder with the adapter.
            dtype: of the weights; None: each as the base's files have it.
        """
        tied = tied_names(model)
        parameters = {name: parameter.shape for name, parameter in model.named_parameters()}
        layout = base_layout(model, base, dtype)
        first = {twin: name for name in parameters for twin in tied.get(name, ())}
        self._adapted = _Adapted(model, base, result, first)
        self.has_base_names = layout is not None and all(
            not self._adapted.changes(group) or reverts(group, base, model) for group in base.groups
        )
        self._model, self._base = model, base
        in_files = {name for group in base.groups for name in group.targets}
        if layout is not None and self.has_base_names:
            self.specs = layout
            added = [name for twin, name in self.untied.items() for name in (twin, name) if name not in in_files]
            shapes = {name: parameters[self.untied.get(name, name)] for name in added}
        else:
            self.specs, shapes = [], {**parameters, **{twin: parameters[name] for twin, name in self.untied.items()}}
        kinds = {name: dtype or base.dtype(self.untied.get(name, name)) for name in shapes}
        self.specs += [TensorSpec(name, kinds[name], tuple(shape)) for name, shape in shapes.items()]
        self._group_of = {name: group for group in base.groups for name in group.stored}
        self._current: tuple[WeightGroup | None, Mapping[str, torch.Tensor]] = (None, {})
        # Larger elements first, as the format's alignment wants it; otherwise the files' order, so that a module is
        # merged once.
        self.specs.sort(key=lambda spec: -spec.dtype.itemsize)
        sizes: dict[torch.dtype, int] = {}
        for spec in self.specs:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
        self.main_dtype = max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_modules(self) -> int:
        """Modules whose weights the adapter changed."""
        return self._adapted.num_modules

    @property
    def untied(self) -> Mapping[str, str]:
        """Weights that the base has once and the result twice: other name -> the model's."""
        return self._adapted.untied

    @property
    def replaced(self) -> Sequence[str]:
        """Weights of the base for which the adapter's file has others."""
        return self._adapted.replaced

    def tensors(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of these, in their order."""
        for spec in specs:
            fault("export")
            if spec.name not in self._base.stored or not self.has_base_names:
                yield spec.name, _in_type(self._adapted.weight(spec.name), spec)
                continue
            group = self._group_of.get(spec.name)
            if group is not None and self._adapted.changes(group):
                yield spec.name, _in_type(self._reverted(group)[spec.name], spec)
            else:
                with OpenFiles() as files:
                    yield spec.name, _in_type(self._base.stored[spec.name].read(files), spec).clone()

    def _reverted(self, group: WeightGroup) -> Mapping[str, torch.Tensor]:
        """The tensors of the files that a group of changed weights becomes."""
        if self._current[0] is not group:
            self._current = (None, {})
            assert self._base.conversions is not None and group.conversion is not None
            weights = {name: self._adapted.weight(name) for name in group.targets}
            made = self._base.conversions.revert(group.conversion, weights, self._model)
            assert made is not None, "it was tried on the meta device"
            self._current = (group, made)
        return self._current[1]


def _in_type(values: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The values in the type in which they are written.

    Raises:
        RefusedError: they overflow in it.
    """
    if values.is_floating_point() and spec.dtype.is_floating_point and values.dtype != spec.dtype:
        check_finite(values, spec.dtype, spec.name)
    return values.to(spec.dtype)


def base_layout(model: nn.Module, base: BaseWeights, dtype: torch.dtype | None) -> list[TensorSpec] | None:
    """The tensors of the base's files, what is merged together side by side; None for a GGUF file.

    Args:
        dtype: of the weights to write; None: each as it is.
    """
    if base.conversions is None:
        return None
    in_groups = [name for group in base.groups for name in group.stored]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights = {name for group in base.groups if group.targets.keys() & parameters for name in group.stored}
    return [
        TensorSpec(name, dtype if dtype and name in weights else stored.dtype, tuple(stored.shape))
        for name, stored in ((name, base.stored[name]) for name in [*in_groups, *base.conversions.unused])
    ]


def reverts(group: WeightGroup, base: BaseWeights, model: nn.Module) -> bool:
    """Whether a group's weights lead back to the tensors of the files that they are made of."""
    assert base.conversions is not None and group.conversion is not None
    weights = {name: torch.empty(shape, device="meta") for name, shape in group.targets.items()}
    made = base.conversions.revert(group.conversion, weights, model)
    return made is not None and all(made[name].shape == stored.shape for name, stored in group.stored.items())


class _Adapted:
    """Weights of the model by name, those of adapted modules with the adapter added."""

    def __init__(self, model: nn.Module, base: BaseWeights, result: Path, first: Mapping[str, str]) -> None:
        """
        Args:
            first: other names of a shared weight -> the model's.

        Raises:
            RefusedError: see `adapt`; an adapter has a bias and its layer has none.
        """
        self._base = base
        self._adapter = adapt(model, result)
        self._started = StartedBase(model, result)
        for name in self._started.names:
            if any(is_nf4(weight) for weight in base.group_of(base_name(name)).stored.values()):
                self._started.refuse_packed(name)
        self._units = dict(_units(model))
        _refuse_lost_biases(self._units, result)
        self._unit_of = {
            base_name(f"{path}.{inner}"): path
            for path, unit in self._units.items()
            for inner, _ in unit.named_parameters()
            if not is_adapter(f".{inner}")
        }
        self._saved_whole = {
            name.replace(".modules_to_save.default", ""): name for name in self._adapter if ".modules_to_save." in name
        }
        self._beside = {base_name(name): tensor for name, tensor in self._adapter.items() if not is_adapter(name)}
        config: Any = model.peft_config
        stays_tied = config["default"].ensure_weight_tying
        self.untied = {} if stays_tied else {twin: name for twin, name in first.items() if self._differ(twin, name)}
        self._own = {twin: name for twin, name in first.items() if twin not in self.untied}
        self._first = first
        self._current: tuple[str, dict[str, torch.Tensor]] = ("", {})

    @property
    def num_modules(self) -> int:
        return len(self._units) + len(self._saved_whole)

    @property
    def replaced(self) -> list[str]:
        return sorted(self._beside)

    def _differ(self, twin: str, name: str) -> bool:
        """Whether the adapter treats the names of one weight differently. PEFT adapts the module of one name alone."""
        if any(one in self._unit_of or one in self._saved_whole for one in (twin, name)):
            whole = [self._adapter[self._saved_whole[one]] for one in (twin, name) if one in self._saved_whole]
            return len(whole) < 2 or not torch.equal(*whole)
        beside = [self._beside[one] for one in (twin, name) if one in self._beside]
        return len(beside) == 2 and not torch.equal(*beside)

    def changes(self, group: WeightGroup) -> bool:
        """Whether one of a group's weights differs from the base's."""
        names = {self._own.get(name, name) for name in group.targets} | set(group.targets)
        others = {twin for twin, name in self._own.items() if name in names}
        changed = self._unit_of.keys() | self._saved_whole.keys() | self._beside.keys()
        return bool(changed & (names | others))

    def weight(self, name: str) -> torch.Tensor:
        """A weight of the result."""
        if name not in self._unit_of and name not in self._saved_whole:
            name = self._own.get(name, name)
        path = self._unit_of.get(name)
        if name in self._saved_whole:
            return self._adapter[self._saved_whole[name]]
        return self._base_weight(name) if path is None else self._merged(path)[name]

    def _base_weight(self, name: str) -> torch.Tensor:
        """A weight before the adapter is added."""
        first = self._first.get(name, name)
        for one in (name, first, *(twin for twin, other in self._first.items() if other == first)):
            if one in self._beside:
                return self._beside[one]
        return self._base[name if name in self._base else first]

    def _merged(self, path: str) -> dict[str, torch.Tensor]:
        """The base weights of one adapted module with the adapter added, float32."""
        if self._current[0] == path:
            return self._current[1]
        self._current = ("", {})
        unit = self._units[path]
        real: dict[str, torch.Tensor] = {}
        for module_path, module in unit.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = ".".join(part for part in (path, module_path, attribute) if part)
                    values = self._adapter[name] if is_adapter(name) else self._base_weight(base_name(name))
                    values = self._started.weight(name, values).float()
                    module._parameters[attribute] = nn.Parameter(values, requires_grad=False)
        for _, module in unit.named_modules():
            if hasattr(module, "merged_adapters"):
                module.merge(safe_merge=True)
        for module_path, module in unit.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = ".".join(part for part in (path, module_path, attribute) if part)
                    if not is_adapter(name):
                        real[base_name(name)] = parameter.detach()
                    module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        self._current = (path, real)
        return real


def adapt(model: nn.Module, result: Path) -> Mapping[str, torch.Tensor]:
    """Put the adapter's modules into the skeleton `model`; returns its tensors by parameter name.

    Raises:
        RefusedError: it cannot be read, or does not fit the model.
    """
    config = read_adapter_config(result)
    config.inference_mode, config.lora_dropout = True, 0.0
    put_adapter(model, config, result)
    return read_adapter_tensors(model, result)


def _refuse_lost_biases(units: Mapping[str, nn.Module], result: Path) -> None:
    """
    Raises:
        RefusedError: an adapter has a bias (`lora_bias`), and the layer that it is merged into has none.
    """
    for path, unit in units.items():
        layer: Any = unit
        if any(layer.lora_bias.values()) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise RefusedError(
                "the adapter has a bias where the base model has none to add it to",
                where=str(result / ADAPTER_CONFIG),
                found=f"lora_bias: true on {path}",
                hint="`roundpipe generate` and PEFT use the adapter as it is",
            )


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that an adapter wraps."""
    last = None
    for path, module in model.named_modules():
        inside = last is not None and path.startswith(last + ".")
        if hasattr(module, "merged_adapters") and hasattr(module, "lora_A") and not inside:
            last = path
            yield path, module
