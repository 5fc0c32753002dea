"""Base weights one by one, by name, from whatever files a model has: memory holds one tensor at a time.

Safetensors under the model's own names and most GGUF files can be read this way. Where tensors are laid out otherwise
(per-expert files of fused experts) transformers' own loader brings the whole model into memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.weights_io import (
    find_places,
    load_weights,
    open_shard,
    packed_parts,
    read_packed_weight,
    tied_names,
)

KNOWN_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names in the header of a safetensors file."""

ReadTensor = Callable[[], torch.Tensor]


class BaseWeights(Mapping[str, torch.Tensor]):
    """Name in the model -> tensor, read anew each time it is asked for."""

    def __init__(self, source: ModelSource, model: nn.Module) -> None:
        """
        Args:
            model: the skeleton, without adapters.

        Raises:
            RefusedError: weights are missing or cannot be read.
        """
        self.whole = False
        """Whether the whole model had to be loaded."""
        self._dtypes: dict[str, torch.dtype] = {}
        names = {name for name, _ in model.named_parameters()}
        if source.gguf_file:
            found = _from_gguf(source, model, names)
        else:
            found = _from_safetensors(source, model, names, self._dtypes)
        if found is None:
            found = _from_transformers(source, model)
            self.whole = True
        self._read = found

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor as the files have it; does not read the tensor where the file's header says it."""
        if name not in self._dtypes:
            self._dtypes[name] = self[name].dtype
        return self._dtypes[name]

    def __iter__(self) -> Any:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def _from_safetensors(
    source: ModelSource, model: nn.Module, names: set[str], dtypes: dict[str, torch.dtype]
) -> dict[str, ReadTensor] | None:
    places = find_places(source.folder, model, names)
    if places is None:
        return None
    for path in {path for path, _ in places.values()}:
        with open_shard(path) as file:
            for name, (where, key) in places.items():
                if where == path and (known := KNOWN_DTYPES.get(file.get_slice(key).get_dtype())):
                    dtypes[name] = known

    def reader(path: Path, key: str) -> ReadTensor:
        def read() -> torch.Tensor:
            with open_shard(path) as file:  # mapped anew: its pages, once read, would count until it is closed
                tensor: torch.Tensor = file.get_tensor(key)
                return tensor.clone()

        return read

    packed = packed_parts(source, places)

    def unpacker(name: str) -> ReadTensor:
        return lambda: read_packed_weight(places[name], packed[name]).dequantized()

    return {name: unpacker(name) if name in packed else reader(path, key) for name, (path, key) in places.items()}


def _from_gguf(source: ModelSource, model: nn.Module, names: set[str]) -> dict[str, ReadTensor] | None:
    """By transformers' own table of names and its processors, which undo what the conversion to GGUF did."""
    from gguf import GGUFReader, dequantize
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    assert source.gguf_file is not None
    path = str(source.folder / source.gguf_file)
    reader = GGUFReader(path)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    if kind.perform_fallback_tensor_mapping is not TensorProcessor.perform_fallback_tensor_mapping:
        return None  # one tensor of the model is several of the file
    processor = kind(config=load_gguf_checkpoint(path)["config"])
    table = get_gguf_hf_weights_map(model, processor)

    def read_of(tensor: Any) -> ReadTensor:
        def read() -> torch.Tensor:
            weights = dequantize(tensor.data, tensor.tensor_type)
            done = processor.process(weights=weights, name=tensor.name, tensor_key_mapping=table, parsed_parameters={})
            return torch.from_numpy(done.weights.copy())

        return read

    found = {table[tensor.name]: read_of(tensor) for tensor in reader.tensors if tensor.name in table}
    tied = tied_names(model)
    for name in names - found.keys():
        twin = next((other for other in tied.get(name, ()) if other in found), None)
        if twin is None:
            return None
        found[name] = found[twin]
    return found


def _from_transformers(source: ModelSource, model: nn.Module) -> dict[str, ReadTensor]:
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        kept[name] = tensor.clone()

    load_weights(source, model, keep)
    missing = {name for name, _ in model.named_parameters()} - kept.keys()
    if missing:
        raise RefusedError("weights of the architecture are missing", where=source.name, found=sorted(missing)[0])
    return {name: (lambda tensor=tensor: tensor) for name, tensor in kept.items()}  # type: ignore[misc]
