"""Weights as a checkpoint stores them: the place of each, the tensors it is made of, and how it is read.

A quantised weight is several tensors of the files (codes, scales, zero points). It appears here under the name that it
has in the unquantised checkpoint, so that whatever comes after need not know how it is stored.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from roundpipe_cli.choices import PackedName
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.untrusted import FileTensor, refusing

# Names of a model's weights: without what adapters put around them, and with those that share one tensor.


def base_name(name: str) -> str:
    """The name of a base weight before adapters were put around it."""
    return re.sub(r"\.(token_adapter|base_layer|original_module)(?=\.|$)", "", name)


SAVED_WHOLE = r"\.modules_to_save\.default"
"""PEFT's words in the names of a module that an adapter has whole."""


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's: low-rank factors, magnitudes, rows of a table, a whole module."""
    return any(mark in name for mark in (".lora_", ".modules_to_save.", ".trainable_tokens_delta"))


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Parameter name -> other names of the same parameter."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(base_name(name))
    return {name: [n for n in group if n != name] for group in groups.values() for name in group if len(group) > 1}


def conv1d_names(model: nn.Module) -> set[str]:
    """Weights of transformers' Conv1D, [inputs, outputs], with and without the backbone's prefix."""
    kinds = ((path, type(module).__name__) for path, module in model.named_modules())
    names = {base_name(f"{path}.weight") for path, kind in kinds if kind == "Conv1D"}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def own_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Base weights under all their names, and buffers that a checkpoint holds."""
    state = model.state_dict(keep_vars=True)
    return {base_name(name): tensor.shape for name, tensor in state.items() if not is_adapter(name)}


DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F4": torch.float4_e2m1fn_x2},
}
"""Names in the header of a safetensors file; of other types nothing is read here."""

MAX_MAPPED_BYTES = 16 * 1024**2
"""Read from mapped files before they are closed, between weights."""

FINITE_CHECK_ELEMENTS = 2**20
"""Values that are checked at once: a check of the whole would hold a copy of a large tensor."""

Unpack = Callable[[Mapping[str, torch.Tensor], torch.dtype], torch.Tensor]
"""Takes the tensors of a quantised weight by their role, and the type to return."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight of the checkpoint."""

    pieces: Mapping[str, FileTensor]
    """Role -> tensor of the files; one piece with the role "" is the weight itself."""
    shape: torch.Size
    dtype: torch.dtype
    """Type in which it is read."""
    unpack: Unpack | None = None
    packed_as: PackedName | None = None
    """Format in which it may stay as the files have it."""
    is_turned: bool = False
    """Whether the result of `unpack` is transposed: quantised files hold a Conv1D as a Linear, outputs first."""

    @property
    def is_quantized(self) -> bool:
        return self.unpack is not None

    def read(self, files: OpenFiles) -> torch.Tensor:
        """The weight; a view of the mapped file where it lies there as it is.

        Raises:
            RefusedError: it is not as its format has it.
        """
        if self.unpack is None:
            return files.tensor(self.pieces[""])
        parts = {role: files.tensor(piece) for role, piece in self.pieces.items()}
        first = next(iter(self.pieces.values()))
        where = f"{first.path}: {first.key}"
        with refusing("a quantised weight is not as its format has it", where):
            weight = self.unpack(parts, self.dtype)
        if self.is_turned:
            weight = weight.T.contiguous()
        if weight.shape != self.shape:
            raise RefusedError(
                "a quantised weight is not whole",
                where=where,
                found=f"shape {list(weight.shape)}",
                expected=f"shape {list(self.shape)}",
            )
        return weight


def plain(piece: FileTensor) -> StoredTensor:
    """A weight that is one tensor of the files; a type that torch does not have is refused."""
    if piece.dtype not in DTYPES:
        raise RefusedError(
            "a tensor of the files has a type that cannot be read",
            where=f"{piece.path}: {piece.key}",
            found=piece.dtype,
            expected=", ".join(DTYPES),
        )
    return StoredTensor({"": piece}, torch.Size(piece.shape), DTYPES[piece.dtype])


def check_finite(values: torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Refuse values that are not finite, or would not be in another type: those above 65,504 in float16."""
    for part in values.flatten().split(FINITE_CHECK_ELEMENTS):
        if bool(torch.isfinite(part.to(dtype)).all()):
            continue
        if not all(bool(torch.isfinite(one).all()) for one in values.flatten().split(FINITE_CHECK_ELEMENTS)):
            raise RefusedError("a base weight is not finite (NaN or infinite)", where=where)
        name = str(dtype).removeprefix("torch.")
        raise RefusedError(
            f"a weight overflows in {name}",
            where=where,
            found=f"values up to {float(part.abs().max()):.4g} in this tensor",
            expected=f"at most {torch.finfo(dtype).max:.5g}, the largest number of {name}",
            hint="bfloat16 and float32 have room for it: dtype=bfloat16 in a recipe, --dtype bfloat16 in an export",
        )


class OpenFiles(AbstractContextManager["OpenFiles"]):
    """Files that are mapped while weights are read: the pages of a mapped file, once read, count until it is closed."""

    def __init__(self) -> None:
        self._stack, self._files = ExitStack(), dict[Path, Any]()
        self._num_bytes = 0
        """Bytes read since the files were opened."""

    def tensor(self, piece: FileTensor) -> torch.Tensor:
        """A tensor on the bytes of its mapped file; invalid when the files are closed."""
        if piece.path not in self._files:
            self._files[piece.path] = self._stack.enter_context(open_shard(piece.path))
        tensor: torch.Tensor = self._files[piece.path].get_tensor(piece.key)
        self._num_bytes += tensor.nbytes
        return tensor

    def close_if_read(self, num_bytes: int = MAX_MAPPED_BYTES) -> None:
        """Close the files if more than that was read from them; their tensors are then invalid.

        Opening a file reads its whole header, 40 ms with 4,500 tensors, so it is not done for every weight.
        """
        if self._num_bytes > num_bytes:
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._num_bytes = 0
        self._stack.close()


def open_shard(path: Path) -> Any:
    """A safetensors file, mapped; a context manager. One that cannot be read is refused."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise RefusedError("a file of the weights cannot be read", where=str(path), found=str(error)) from error
