"""Weights from and to disk, one at a time: the host never holds a second copy.

What a file holds as it is in the model is copied from the mapped file into the store. Everything else (experts that are
fused, quantised weights, GGUF files) is converted weight by weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.model.base_weights import BaseWeights, WeightGroup
from roundpipe_cli.model.quantization import WHAT_WORKS
from roundpipe_cli.model.quantized_files import PackedWeight, is_nf4, read_nf4
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.stored.names import base_name, is_adapter
from roundpipe_cli.model.stored.tensors import OpenFiles, check_finite
from roundpipe_cli.model.unread import check_unread
from roundpipe_cli.watchdog import at_work

SetParameter = Callable[[str, torch.Tensor], None]
SetPacked = Callable[[str, PackedWeight], None]


def load_weights(
    source: ModelSource, model: nn.Module, set_parameter: SetParameter, set_packed: SetPacked | None = None
) -> list[str]:
    """Pass every base weight of `model` (a skeleton, adapters included) to `set_parameter`, and fill its buffers.

    Args:
        set_packed: takes the weights that lie in the files in 4 bit; None: they are unpacked for `set_parameter`.

    Returns:
        notices about what the files hold.

    Raises:
        RefusedError: missing or misshapen tensors, values that are not finite, unreadable files.
    """
    parameters = {base_name(name): (name, p) for name, p in model.named_parameters() if not is_adapter(name)}
    dtype = next(p.dtype for _, p in parameters.values() if p.is_floating_point())
    base = BaseWeights(source, model, dtype)
    left_out = check_unread(model, source.name, base.unread, base.sources)
    names = {name: own for name, (own, _) in parameters.items()}
    checked = _Checked(source.name, names, {name: p for name, (_, p) in parameters.items()}, set_parameter)
    buffers = dict(model.named_buffers())
    twins = {found: name for name, found in base.twins.items()}
    with OpenFiles() as files:
        for group in base.groups:
            files.close_if_read()
            if set_packed is not None and (packed := _packed_name(group, source)):
                checked.put_packed(packed, read_nf4(next(iter(group.stored.values())), files), set_packed)
                continue
            with at_work(f"loading {next(iter(group.targets))}"):
                weights = group.read(files, dtype)
            for name, tensor in weights.items():
                if name in buffers:
                    buffers[name].copy_(tensor)
                elif twins.get(name, name) in names:  # the other name of a shared matrix may be the model's
                    checked.put(twins.get(name, name), tensor)
    return [*([left_out] if left_out else []), *_notices(base)]


def _packed_name(group: WeightGroup, source: ModelSource) -> str | None:
    """Name of the group's weight, if the files hold it in bitsandbytes' 4 bit.

    Raises:
        RefusedError: they do, but it is only a part of a weight.
    """
    if not any(is_nf4(weight) for weight in group.stored.values()):
        return None
    is_turned = any(weight.is_turned for weight in group.stored.values())
    if is_turned or (group.conversion is not None and group.conversion.rule is not None):
        raise RefusedError(
            "the files hold this architecture's weights in another arrangement, which cannot be read in 4 bit",
            where=source.name,
            expected=WHAT_WORKS,
        )
    return next(iter(group.targets))


def _notices(base: BaseWeights) -> list[str]:
    notices = []
    if dequantized := [name for name, weight in base.stored.items() if weight.is_quantized and not is_nf4(weight)]:
        notices.append(f"{len(dequantized)} weights are quantised in the files and dequantised while loading")
    return notices


def packed_names(source: ModelSource, model: nn.Module) -> frozenset[str]:
    """Names in `model`, adapters included, of the weights that lie in the files in 4 bit."""
    names = {base_name(name): name for name, _ in model.named_parameters() if not is_adapter(name)}
    groups = BaseWeights(source, model, torch.float32).groups
    found = (_packed_name(group, source) for group in groups)
    return frozenset(names[name] for name in found if name in names)


class _Checked:
    """Checks a tensor and passes it on under the skeleton's name."""

    def __init__(
        self, where: str, names: Mapping[str, str], parameters: Mapping[str, nn.Parameter], set_parameter: SetParameter
    ) -> None:
        self._where, self._names, self._parameters, self._set = where, names, parameters, set_parameter

    def put(self, name: str, tensor: torch.Tensor) -> None:
        with at_work(f"loading {name}"):
            fault("load")
            self._put(name, tensor)

    def put_packed(self, name: str, weight: PackedWeight, set_packed: SetPacked) -> None:
        with at_work(f"loading {name}"):
            fault("load")
            self._check_shape(name, weight.shape)
            check_finite(weight.scales, self._parameters[name].dtype, f"{self._where}: {name}")
            set_packed(self._names[name], weight)

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        if shape != self._parameters[name].shape:
            raise RefusedError(
                "a weight has another shape than the architecture",
                where=f"{self._where}: {name}",
                found=str(list(shape)),
                expected=str(list(self._parameters[name].shape)),
            )

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._check_shape(name, tensor.shape)
        if tensor.dtype.itemsize == 1:  # without its scales, which are unknown here
            raise RefusedError(
                "a base weight is quantised in a form that cannot be read",
                where=f"{self._where}: {name}",
                found=str(tensor.dtype).removeprefix("torch."),
                expected=WHAT_WORKS,
            )
        check_finite(tensor, self._parameters[name].dtype, f"{self._where}: {name}")
        self._set(self._names[name], tensor)


def save_model(model: nn.Module, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a full model in Hugging Face format, from `weights` by parameter name of the skeleton `model`."""
    state = {base_name(name): tensor for name, tensor in weights.items()}
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            state[name] = buffer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder), state_dict=state, safe_serialization=True)  # type: ignore[operator]
