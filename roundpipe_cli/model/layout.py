"""The place of each parameter in its layer's flat buffer.

    | frozen parameters, any dtype | trainable parameters, one dtype |
    ^ page border                  ^ trainable_offset_bytes

Every parameter starts at a multiple of 64 bytes, because alignment changes the bits that CPU kernels produce.
Trainable parameters are spaced by elements, the same in every dtype, so that the 16-bit weights, the float32 masters,
the gradients and the moments of a layer are flat tensors of equal length and one kernel updates a whole layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from roundpipe_cli.choices import PackedName
from roundpipe_cli.model.packed_weights import ALIGNMENT_BYTES, PackedParameter, packed_bytes, quantize

TRAINABLE_ALIGNMENT_ELEMENTS = 32
"""64 bytes in a 16-bit dtype, 128 bytes in float32."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """One parameter's place in its layer's buffer."""

    name: str
    """Full name in the model, `model.layers.3.mlp.up_proj.weight`."""
    shape: torch.Size
    dtype: torch.dtype
    offset_bytes: int
    trainable: bool
    element_offset: int = 0
    """Trainable parameters: first element in the layer's flat trainable tensor."""
    packed_as: PackedName | None = None
    """It lies here packed (`model/packed_weights.py`) and `dtype` is that in which it is used. None: whole."""

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    @property
    def num_bytes(self) -> int:
        return packed_bytes(self.shape, self.packed_as) if self.packed_as else self.num_elements * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """This parameter as a view of `buffer`, the layer's bytes as a uint8 tensor of shape [num_bytes].

        Packed: its bytes as they are.
        """
        raw = buffer[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return raw if self.packed_as else raw.view(self.dtype).view(self.shape)

    def write(self, view: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` into this parameter's `view`."""
        if self.packed_as:
            quantize(values.to(self.dtype), view, self.packed_as)
        else:
            view.copy_(values)

    def parameter(self, buffer: torch.Tensor) -> torch.nn.Parameter:
        """This parameter as a `Parameter` on `buffer`'s bytes with a version counter of its own.

        An ordinary view shares its counter with all other views of the buffer, and PEFT's wrapper of fused experts
        writes to its parameter in place (the same bytes), which autograd would then take for a change of all of them.
        """
        if self.packed_as:
            return PackedParameter.of(self.view(buffer), self.shape, self.dtype, self.packed_as)
        start_bytes = buffer.storage_offset() * buffer.element_size() + self.offset_bytes
        own = torch.empty(0, dtype=self.dtype, device=buffer.device)
        own.set_(buffer.untyped_storage(), start_bytes // self.dtype.itemsize, self.shape)  # type: ignore[call-overload]
        return torch.nn.Parameter(own, requires_grad=self.trainable)

    def trainable_view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter as a view of a flat trainable tensor (gradients, masters, moments)."""
        return flat[self.element_offset : self.element_offset + self.num_elements].view(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """All parameters of one layer, in buffer order."""

    name: str
    places: tuple[ParameterPlace, ...]
    num_bytes: int
    """Size of the flat buffer: weights, frozen and trainable."""
    trainable_offset_bytes: int
    num_trainable_elements: int
    """Padding included: length of the flat trainable tensors."""
    trainable_dtype: torch.dtype

    @property
    def trainable(self) -> tuple[ParameterPlace, ...]:
        return tuple(place for place in self.places if place.trainable)

    @property
    def num_parameters(self) -> int:
        return sum(place.num_elements for place in self.places)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the packed weights, unpacked."""
        return sum(place.num_elements * place.dtype.itemsize for place in self.places if place.packed_as)

    @property
    def trainable_num_bytes(self) -> int:
        """Bytes of the trainable part of the buffer."""
        return self.num_trainable_elements * self.trainable_dtype.itemsize

    def trainable_bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """The trainable part of `buffer` as a flat tensor of shape [num_trainable_elements]."""
        end = self.trainable_offset_bytes + self.trainable_num_bytes
        return buffer[self.trainable_offset_bytes : end].view(self.trainable_dtype)


def make_layout(
    name: str,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    dtype: torch.dtype,
    packed: Collection[str] = (),
    packed_as: PackedName | None = "4bit",
) -> LayerLayout:
    """Lay out the parameters of one layer; a parameter is trainable if it requires grad.

    Args:
        packed: names of the frozen ones to keep packed.
        packed_as: in which format.

    Raises:
        ValueError: a trainable parameter is not of `dtype`.
    """
    listed = list(parameters)
    places: list[ParameterPlace] = []
    offset = 0
    for parameter_name, parameter in listed:
        if not parameter.requires_grad:
            offset = round_up(offset, ALIGNMENT_BYTES)
            kept = packed_as if parameter_name in packed else None
            places.append(
                ParameterPlace(parameter_name, parameter.shape, parameter.dtype, offset, False, packed_as=kept)
            )
            offset += places[-1].num_bytes
    trainable_offset = round_up(offset, ALIGNMENT_BYTES * 2)
    elements = 0
    for parameter_name, parameter in listed:
        if parameter.requires_grad:
            if parameter.dtype != dtype:
                raise ValueError(f"{parameter_name} is trainable and {parameter.dtype}, expected {dtype}")
            start = trainable_offset + elements * dtype.itemsize
            places.append(ParameterPlace(parameter_name, parameter.shape, dtype, start, True, elements))
            elements = round_up(elements + parameter.numel(), TRAINABLE_ALIGNMENT_ELEMENTS)
    num_bytes = trainable_offset + elements * dtype.itemsize if elements else offset
    return LayerLayout(name, tuple(places), num_bytes, trainable_offset, elements, dtype)
