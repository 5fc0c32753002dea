"""Writing the safetensors format tensor by tensor, so that no second copy of the whole state is ever in memory.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length N (little endian),
N bytes of JSON `{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}` that begins with `{`
and may end in spaces, then the tensors' bytes without gaps, offsets counted from the end of the header.
The library's own `serialize` needs all bytes at once; its `safe_open` reads what is written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's entry in the header, known before its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


@dataclass(frozen=True)
class TensorStream:
    """Tensors that come into being one after the other, for instance a layer's snapshot at a time.

    `specs` announces them all; `tensors` is run through once and yields them in that order. A tensor may be
    overwritten by its owner as soon as the next one is asked for.
    """

    specs: tuple[TensorSpec, ...]
    tensors: Iterable[tuple[str, torch.Tensor]]
    metadata: Mapping[str, str] | None = None
    """Metadata of the header; transformers wants `{"format": "pt"}`."""

    @staticmethod
    def of(group: TensorGroup) -> TensorStream:
        """Any accepted form of a group as a stream.

        A mapping or list keeps its order among tensors of one element size, larger elements first, so that every
        tensor is aligned. Its tensors must exist already: a generator is run to its end here; use a `TensorStream`
        where that would make a copy of everything.
        """
        if isinstance(group, TensorStream):
            return group
        pairs = list(group.items() if isinstance(group, Mapping) else group)
        pairs.sort(key=lambda pair: -pair[1].dtype.itemsize)
        return TensorStream(tuple(TensorSpec.of(name, tensor) for name, tensor in pairs), pairs)


TensorGroup = TensorStream | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON header, padded so that the tensors begin at a multiple of 8 bytes.

    Raises:
        ValueError: two tensors of one name, a dtype that safetensors lacks, or a tensor that would not be aligned.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        if spec.name in header or spec.name == "__metadata__":
            raise ValueError(f"two tensors named {spec.name!r} in one group")
        if spec.dtype not in DTYPE_NAMES:
            raise ValueError(f"safetensors has no name for {spec.dtype} (tensor {spec.name!r})")
        if offset % spec.dtype.itemsize:
            raise ValueError(f"tensor {spec.name!r} would begin at byte {offset}: put larger element sizes first")
        end = offset + spec.num_bytes
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream_file(stream: TensorStream) -> Iterator[bytes | memoryview]:
    """The bytes of the file, header first, then one piece a tensor (its own memory where it is contiguous, on the CPU).

    Raises:
        ValueError: `stream.tensors` does not yield what `stream.specs` announces.
    """
    yield encode_header(stream.specs, stream.metadata)
    yield from _checked_pieces(stream)


@dataclass(frozen=True)
class FileSet:
    """Several files whose bytes come in one run, for instance all that belongs to one layer, then the next layer.

    `specs` announces each file's tensors, in their order; `pieces` is run through once and yields (file, next bytes of
    its tensors). A piece may be overwritten by its owner as soon as the next one is asked for.
    """

    specs: Mapping[str, tuple[TensorSpec, ...]]
    pieces: Iterable[tuple[str, memoryview]]

    @staticmethod
    def of(groups: Mapping[str, TensorGroup]) -> FileSet:
        """One file after the other, a tensor at a time (its own memory where it is contiguous, on the CPU)."""
        streams = {name: TensorStream.of(group) for name, group in groups.items()}
        pieces = ((name, piece) for name, stream in streams.items() for piece in _checked_pieces(stream))
        return FileSet({name: stream.specs for name, stream in streams.items()}, pieces)

    def num_bytes(self, name: str) -> int:
        """Size of one of the files."""
        return len(encode_header(self.specs[name])) + sum(spec.num_bytes for spec in self.specs[name])


def _checked_pieces(stream: TensorStream) -> Iterator[memoryview]:
    """The bytes of each tensor.

    Raises:
        ValueError: `stream.tensors` does not yield what `stream.specs` announces.
    """
    num_seen = 0
    for name, tensor in stream.tensors:
        expected = stream.specs[num_seen] if num_seen < len(stream.specs) else None
        if TensorSpec.of(name, tensor) != expected:
            raise ValueError(f"tensor {num_seen} is {TensorSpec.of(name, tensor)}, announced was {expected}")
        num_seen += 1
        yield bytes_of_tensor(tensor)
    if num_seen != len(stream.specs):
        raise ValueError(f"{len(stream.specs)} tensors were announced, {num_seen} came")


def bytes_of_tensor(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order as bytes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
