"""The place of each parameter in its layer's flat buffer.

    | frozen parameters, any dtype | trainable parameters, one dtype | those of them that are used in float32, again |
    ^ page border                  ^ trainable_offset_bytes

Every parameter starts at a multiple of 64 bytes, because alignment changes the bits that CPU kernels produce.
Trainable parameters are spaced by elements, the same in every dtype, so that the 16-bit weights, the float32 masters,
the gradients and the moments of a layer are flat tensors of equal length and one kernel updates a whole layer. A few
parameters of a 16-bit model stay in float32 (routers of Ernie 4.5, DeepSeek's in later releases of transformers): a
copy of their masters lies behind that flat tensor, and blocks compute with that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from roundpipe_cli.choices import PackedName
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import ALIGNMENT_BYTES, PackedParameter, packed_bytes, quantize

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
    """Format in which the parameter is packed (`model/stored/packed_weights.py`); `dtype` is that of its use."""

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    @property
    def num_bytes(self) -> int:
        return packed_bytes(self.shape, self.packed_as) if self.packed_as else self.num_elements * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of `buffer`, the layer's bytes as a uint8 tensor of shape [num_bytes].

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
        """The parameter as a `Parameter` on `buffer`'s bytes with a version counter of its own.

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
        """The parameter as a view of a flat trainable tensor (gradients, masters, moments)."""
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
    """Type of most parameters; one may be used in float32 where this has 16 bits."""

    @property
    def wide(self) -> tuple[ParameterPlace, ...]:
        """Trainable parameters that are used in another dtype than the layer's: in float32."""
        return tuple(place for place in self.trainable if place.dtype != self.trainable_dtype)

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
        return self.num_bytes - self.trainable_offset_bytes if self.num_trainable_elements else 0

    def trainable_bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """The trainable part of `buffer`, uint8 [trainable_num_bytes]."""
        return buffer[self.trainable_offset_bytes :][: self.trainable_num_bytes]

    def trainable_flat(self, trainable: torch.Tensor) -> torch.Tensor:
        """The flat tensor [num_trainable_elements] that `trainable`, the trainable bytes, begins with."""
        return trainable[: self.num_trainable_elements * self.trainable_dtype.itemsize].view(self.trainable_dtype)


def make_layout(
    name: str,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    dtype: torch.dtype,
    packed: Collection[str] = (),
    *,
    packed_as: PackedName | None = "4bit",
) -> LayerLayout:
    """Lay out the parameters of one layer: trainable ones require grad, frozen ones named in `packed` are kept packed.

    Raises:
        ValueError: a trainable parameter is neither of `dtype` nor of float32.
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
    trained, elements = _place_trainable(listed, dtype, trainable_offset)
    if not elements:
        return LayerLayout(name, tuple(places), offset, trainable_offset, 0, dtype)
    end = max(place.offset_bytes + place.num_elements * place.dtype.itemsize for place in trained)
    num_bytes = max(end, trainable_offset + elements * dtype.itemsize)
    return LayerLayout(name, (*places, *trained), num_bytes, trainable_offset, elements, dtype)


def _place_trainable(
    listed: Iterable[tuple[str, torch.nn.Parameter]], dtype: torch.dtype, offset: int
) -> tuple[list[ParameterPlace], int]:
    """Places of the trainable ones of `listed` from `offset` on, and the length of the layer's flat tensors."""
    trained = [(name, parameter) for name, parameter in listed if parameter.requires_grad]
    starts: list[int] = []
    elements = 0
    for name, parameter in trained:
        if parameter.dtype not in (dtype, torch.float32):
            raise ValueError(f"{name} is trainable and {parameter.dtype}, expected {dtype}")
        starts.append(elements)
        elements = round_up(elements + parameter.numel(), TRAINABLE_ALIGNMENT_ELEMENTS)
    places: list[ParameterPlace] = []
    end = offset + elements * dtype.itemsize
    for (name, parameter), start in zip(trained, starts, strict=True):
        at = offset + start * dtype.itemsize
        if parameter.dtype != dtype:
            at = round_up(end, ALIGNMENT_BYTES)
            end = at + parameter.numel() * parameter.dtype.itemsize
        places.append(ParameterPlace(name, parameter.shape, parameter.dtype, at, True, start))
    return places, elements


def layer_parameters(model: nn.Module, split: ModelSplit) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each layer, `embed` first and `head` last. A parameter that both share belongs to the head."""
    names = {id(p): name for name, p in model.named_parameters()}
    blocks = [
        [(names[id(p)], p) for p in block.parameters()] for block in model.get_submodule(split.blocks_path).children()
    ]
    in_blocks = {id(p) for block in blocks for _, p in block}
    others = [(name, p) for name, p in model.named_parameters() if id(p) not in in_blocks]
    backbone, tail = f"{split.backbone_path}.", tuple(f"{path}." for path in split.tail_paths)
    head_ids = {
        id(p)
        for name, p in model.named_parameters(remove_duplicate=False)  # under all names of a tied table
        if name.startswith(tail) or not name.startswith(backbone)
    }
    embed, head = ([(name, p) for name, p in others if (id(p) in head_ids) is is_head] for is_head in (False, True))
    return [embed, *blocks, head]
