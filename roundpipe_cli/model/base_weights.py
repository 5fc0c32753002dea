"""Base weights by name, from any kind of file: memory holds one weight at a time.

Weights are read in groups: those that are made of the same tensors of the files. Most groups are one weight of one
tensor; fused experts are one of many, by transformers' own rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.stored.conversions import Conversions, WeightConversion, find_conversions
from roundpipe_cli.model.stored.gguf import gguf_weights
from roundpipe_cli.model.stored.names import base_name, conv1d_names, is_adapter, own_shapes, tied_names
from roundpipe_cli.model.stored.quantized import find_stored
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor, check_finite, turned
from roundpipe_cli.model.unread import switch_for

MOST_TENSORS_PER_WEIGHT = 2048
"""Most tensors of a group: a fused weight of experts may be stored as a tensor per expert and projection."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights of the model that are read together."""

    targets: Mapping[str, torch.Size]
    read: Callable[[OpenFiles, torch.dtype | None], dict[str, torch.Tensor]]
    """Reads them, as the files have them or in a type; what lies in a file as it is stays a view of it."""
    stored: Mapping[str, StoredTensor]
    """The tensors they are made of; empty for a GGUF file."""
    conversion: WeightConversion | None = None


class BaseWeights(Mapping[str, torch.Tensor]):
    """Name in the model -> tensor, read again at each access."""

    def __init__(self, source: ModelSource, model: nn.Module, dtype: torch.dtype) -> None:
        """
        Args:
            model: the skeleton; adapters may be in it.
            dtype: of weights that are dequantised.

        Raises:
            RefusedError: weights are missing or cannot be read.
        """
        self.conversions: Conversions | None = None
        """How the files' tensors become the model's weights; None for a GGUF file."""
        self.stored: dict[str, StoredTensor] = {}
        """The files' weights under the names of the unquantised checkpoint; empty for a GGUF file."""
        self.unread: Mapping[str, Callable[[], torch.Tensor]] = {}
        """Tensors of the files that are in no weight of the model, and how each is read."""
        self.sources: dict[str, str] = {}
        """All other tensors of the files, and a weight that each is in."""
        self._model = model
        self.groups = self._find_groups(source, dtype)
        self._group_of = {name: group for group in self.groups for name in group.targets}
        names = [base_name(name) for name, _ in model.named_parameters() if not is_adapter(name)]
        self._twins = _find_missing(source, model, names, self._group_of)

    def _find_groups(self, source: ModelSource, dtype: torch.dtype) -> list[WeightGroup]:
        if source.gguf_file is not None:
            found, self.unread = gguf_weights(source, self._model)
            self.sources = {name: next(iter(targets)) for targets, _, names in found for name in names}
            return [
                WeightGroup(targets, lambda files, dtype, read=read: read(), {})  # type: ignore[misc]
                for targets, read, _ in found
            ]
        self.stored = find_stored(source.folder, dtype)
        for name in conv1d_names(self._model) & self.stored.keys():
            if self.stored[name].is_quantized:
                self.stored[name] = turned(self.stored[name])
        own = own_shapes(self._model)
        if len(self.stored) > MOST_TENSORS_PER_WEIGHT * len(own):
            raise RefusedError(
                "the files hold far more tensors than the architecture has weights",
                where=str(source.folder),
                found=str(len(self.stored)),
                expected=f"about {len(own)}",
            )
        shapes = {name: weight.shape for name, weight in self.stored.items()}
        self.conversions = find_conversions(self._model, shapes, own)
        self.sources = {name: next(iter(one.targets)) for one in self.conversions.found for name in one.sources}
        self.unread = {name: functools.partial(self._stored, name) for name in self.conversions.unused}
        return [self._group(conversion) for conversion in self.conversions.found]

    def _stored(self, name: str) -> torch.Tensor:
        with OpenFiles() as files:
            return self.stored[name].read(files).clone()

    def _group(self, conversion: WeightConversion) -> WeightGroup:
        def read(files: OpenFiles, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
            def tensor(name: str) -> torch.Tensor:
                values = self.stored[name].read(files)
                if dtype is None or conversion.rule is None:
                    return values
                check_finite(values, dtype, name)
                return values.to(dtype)

            return conversion.apply(tensor, self._model)

        stored = {name: self.stored[name] for name in conversion.sources}
        return WeightGroup(conversion.targets, read, stored, conversion)

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self._twins.get(name, name)
        with OpenFiles() as files:
            return self._group_of[name].read(files, None)[name].clone()

    def group_of(self, name: str) -> WeightGroup:
        """The group that a weight is read with."""
        return self._group_of[self._twins.get(name, name)]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a weight as it is read; does not read it where a file's header says it."""
        group = self.group_of(name)
        return next(iter(group.stored.values())).dtype if group.stored else torch.float32

    @property
    def twins(self) -> Mapping[str, str]:
        """Names of weights that the files have under another name of the same parameter."""
        return self._twins

    def __iter__(self) -> Iterator[str]:
        return iter([*self._group_of, *self._twins])

    def __len__(self) -> int:
        return len(self._group_of) + len(self._twins)


def _find_missing(
    source: ModelSource, model: nn.Module, names: list[str], found: Mapping[str, WeightGroup]
) -> dict[str, str]:
    """Names that the files do not have -> another name of the same parameter that they have.

    Raises:
        RefusedError: there is none.
    """
    tied, missing = tied_names(model), list[str]()
    twins: dict[str, str] = {}
    for name in names:
        if name not in found:
            twin = next((other for other in tied.get(name, ()) if other in found), None)
            missing += [name] if twin is None else []
            twins |= {} if twin is None else {name: twin}
    if missing:
        raise RefusedError(
            "weights of the architecture are missing",
            where=source.name,
            found=f"{len(missing)} missing, for instance {', '.join(missing[:3])}",
            hint=switch_for(model, unfilled=missing) if source.gguf_file is None else None,
        )
    return twins
