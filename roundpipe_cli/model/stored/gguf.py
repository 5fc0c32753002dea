"""A GGUF file's weights, one at a time, dequantised to float32.

By transformers' own tables of names and its processors, which undo what the conversion to GGUF did. Fused experts are
dequantised one expert after the other, other weights some rows after the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from roundpipe_cli.library_names import library_name
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import refusing
from roundpipe_cli.model.stored.conversions import WeightGroup, find_conversions, gguf_rules
from roundpipe_cli.model.stored.tensors import base_name, is_adapter, own_shapes

GGUF_TABLES = "transformers.modeling_gguf_pytorch_utils"

ROWS_AT_ONCE = 4096
BACKBONE_DEPTH = 2
Found = tuple[list[WeightGroup], Mapping[str, Callable[[], torch.Tensor]]]
"""Weights that are read together, and the tensors of the file that are in none, each with what reads it."""


def gguf_weights(source: ModelSource, model: nn.Module) -> Found:
    """Weights of the model that are read together, and what of the file is not read.

    Raises:
        RefusedError: the file cannot be read, or transformers does not know its names.
    """
    from gguf import GGUFReader

    assert source.gguf_file is not None
    path = source.folder / source.gguf_file
    with refusing("the model's weights cannot be loaded", str(path)):
        reader = GGUFReader(str(path))
        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        rules = gguf_rules(architecture, model.config)
        if rules is None:
            return _by_tables(reader.tensors, architecture, model)
        return _by_rules(reader.tensors, rules, model)


def _by_tables(tensors: list[Any], architecture: str, model: nn.Module) -> Found:
    processors, usual = (library_name(GGUF_TABLES, name) for name in ("TENSOR_PROCESSORS", "TensorProcessor"))
    config: Any = model.config
    text = config.get_text_config()
    # under all names of its values, as processors ask for them; reading them from the file is slow
    settings = {**text.to_dict(), **{name: getattr(text, name, None) for name in text.attribute_map}}
    processor = processors.get(architecture, usual)(config=settings)
    table = library_name(GGUF_TABLES, "get_gguf_hf_weights_map")(_BaseNames(model), processor)
    own = own_shapes(model)
    parts: dict[str, list[Any]] = {}
    unread = []
    for tensor in tensors:
        target = table.get(tensor.name) or table.get(tensor.name.removesuffix(".weight"))
        if target in own:
            parts.setdefault(target, []).append(tensor)
        else:
            unread.append(tensor)

    def read(target: str, listed: list[Any], *_: object) -> dict[str, torch.Tensor]:
        if listed[0].data.ndim < 3:
            return {target: _processed(listed, target, processor, table, rows=slice(None))}
        whole = torch.empty(own[target])
        for expert in range(len(listed[0].data)):
            whole[expert] = _processed(listed, target, processor, table, rows=slice(expert, expert + 1))[0]
        return {target: whole}

    groups = [
        WeightGroup({target: own[target]}, [one.name for one in listed], functools.partial(read, target, listed))
        for target, listed in parts.items()
    ]
    return groups, {tensor.name: functools.partial(_whole, tensor) for tensor in unread}


class _BaseNames:
    """The part of a model that transformers reads for its table of names, without the adapters that are in it.

    It asks every module on its own, for names that begin there, and makes the table of all names each time: minutes for
    a model of many blocks. Names begin at the model or at its backbone, which is at most two levels down.
    """

    def __init__(self, module: nn.Module, depth: int = 0) -> None:
        self._module, self._depth = module, depth
        self.config = getattr(module, "config", None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = self._module.state_dict(keep_vars=True)
        return {base_name(name): tensor for name, tensor in state.items() if not is_adapter(name)}

    def named_children(self) -> Iterator[tuple[str, _BaseNames]]:
        below = self._module.named_children() if self._depth < BACKBONE_DEPTH else ()
        return ((name, _BaseNames(child, self._depth + 1)) for name, child in below)


def _processed(
    tensors: list[Any], target: str, processor: Any, table: Mapping[str, str], *, rows: slice
) -> torch.Tensor:
    """The model's weight from the file's tensors that make it: one, or gates and what they multiply."""
    parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    weight = None
    for tensor in tensors:
        values = _dequantized(tensor, rows)
        done = processor.process(weights=values, name=tensor.name, tensor_key_mapping=table, parsed_parameters=parsed)
        if done.name is not None:
            weight = torch.from_numpy(numpy.require(done.weights, requirements=["C", "W"]))
    return parsed["tensors"][target] if weight is None else weight


def _dequantized(tensor: Any, rows: slice) -> Any:
    """Float32 values of some rows, or experts, of a tensor of the file."""
    from gguf import dequantize

    data = tensor.data[rows]
    if data.ndim != 2 or len(data) <= ROWS_AT_ONCE:
        return dequantize(data, tensor.tensor_type)
    first = dequantize(data[:1], tensor.tensor_type)
    whole = numpy.empty((len(data), *first.shape[1:]), dtype=first.dtype)
    for start in range(0, len(data), ROWS_AT_ONCE):
        whole[start : start + ROWS_AT_ONCE] = dequantize(data[start : start + ROWS_AT_ONCE], tensor.tensor_type)
    return whole


def _whole(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(numpy.require(_dequantized(tensor, slice(None)), requirements=["C", "W"]))


def _by_rules(tensors: list[Any], rules: list[Any], model: nn.Module) -> Found:
    by_name = {tensor.name: tensor for tensor in tensors}
    stored = {name: torch.Size(int(size) for size in reversed(tensor.shape)) for name, tensor in by_name.items()}
    conversions = find_conversions(model, stored, own_shapes(model), rules)

    def read(name: str) -> torch.Tensor:
        return _whole(by_name[name])

    groups = [
        WeightGroup(one.targets, one.sources, lambda *_, one=one: one.apply(read, model))  # type: ignore[misc]
        for one in conversions.found
    ]
    return groups, {name: functools.partial(read, name) for name in conversions.unused}
