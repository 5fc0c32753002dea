"""Weights from and to disk, one at a time: the host never holds a second copy.

What a file holds as it is in the model is copied from the mapped file into the store. Everything else (experts that are
fused, quantised weights, GGUF files) is converted weight by weight.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from roundpipe_cli.choices import PackedName
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.model.files.quantization import WHAT_WORKS
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.new_tokens import NewTokens, table_names, with_new_rows
from roundpipe_cli.model.split import find_blocks
from roundpipe_cli.model.stored.conversions import Conversions, WeightConversion, WeightGroup, find_conversions
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.gguf import gguf_weights
from roundpipe_cli.model.stored.nf4 import read_nf4
from roundpipe_cli.model.stored.packed_weights import PackedWeight
from roundpipe_cli.model.stored.scaled_floats import stored_codes, stored_scales
from roundpipe_cli.model.stored.tensors import (
    SAVED_WHOLE,
    OpenFiles,
    StoredTensor,
    base_name,
    check_finite,
    conv1d_names,
    is_adapter,
    own_shapes,
    tied_names,
)
from roundpipe_cli.watchdog import at_work

# Tensors of a model's files for which its architecture has no place: what is left out with a notice, and what is
# refused because the model would compute something else without it.
#
# A configuration decides whether there are biases and norms, and how many blocks; the files say which of them were
# trained. transformers drops the rest with a warning.

Read = Callable[[], torch.Tensor]
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor of llama.cpp's: what the frequencies of rotary embeddings are divided by."""
AS_SAFETENSORS = "take the same model as safetensors, whose config.json says what it has"
_IN_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)")
"""The part before a block's number, the number, and the name in the block."""
_PART = re.compile(r"\.bias$|norm[^.]*\.(weight|bias)$")
BY_CONFIG = "correct config.json: its keys say whether there are biases, norms and an LM head beside the embedding"


def check_unread(model: nn.Module, where: str, unread: Mapping[str, Read], read: Mapping[str, str]) -> str | None:
    """A notice about the `unread` tensors of the files, each with what reads it; None where there are none.

    `read`: names of all others -> a weight of `model`, the skeleton, that is made of them.

    Raises:
        RefusedError: the model's blocks are not those of the files without them.
    """
    if not unread:
        return None
    path = find_blocks(model)[0]
    prefixes = {match[1] for name, target in read.items() if f"{path}." in target and (match := _IN_BLOCK.match(name))}
    blocks: dict[int, set[str]] = defaultdict(set)
    for name in (*read, *unread):
        if (match := _IN_BLOCK.match(name)) and match[1] in prefixes:
            blocks[int(match[2])].add(match[3])
    count = len(list(model.get_submodule(path).children()))
    known = [names for index, names in blocks.items() if index < count]
    more = sorted(index for index, names in blocks.items() if index >= count and names in known)
    if more:
        raise RefusedError(
            "the files hold more blocks than the model's configuration",
            where=where,
            found=f"{count + len(more)} blocks like these",
            expected=f"{count}, num_hidden_layers of the configuration",
            hint="correct num_hidden_layers in config.json, or remove the blocks from the files",
        )
    may_ignore = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    lost = [
        name
        for name, values in unread.items()
        if (match := _IN_BLOCK.match(name)) and match[1] in prefixes and int(match[2]) < count
        if _PART.search(name) and not any(one.search(name) for one in may_ignore) and _matters(name, values())
    ]
    if lost:
        raise RefusedError(
            "the files hold parts of the blocks that the model's configuration leaves out",
            where=where,
            found=f"{len(lost)} tensors, {_some(lost)}",
            expected="blocks as they were trained",
            hint=AS_SAFETENSORS if prefixes == {"blk."} else f"{BY_CONFIG}; or remove the tensors if they mean nothing",
        )
    if ROPE_FACTORS in unread and not bool((unread[ROPE_FACTORS]() == 1).all()):
        raise RefusedError(
            "the file scales the model's rotary frequencies, which transformers does not read from GGUF files",
            where=where,
            found=ROPE_FACTORS,
            hint=AS_SAFETENSORS,
        )
    which = f"{len(unread)} of the files' tensors, {_some(list(unread))}"
    return f"left out, for they have no place in this architecture: {which}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def _matters(name: str, values: torch.Tensor) -> bool:
    """Whether a bias or a norm changes what is computed: a bias of zeros does not, a mask under its name is none."""
    return values.dim() == 1 and values.is_floating_point() and (not name.endswith(".bias") or bool(values.any()))


# Base weights by name, from any kind of file: memory holds one weight at a time.
#
# Weights are read in groups: those that are made of the same tensors of the files. Most groups are one weight of one
# tensor; fused experts are one of many, by transformers' own rules.

MOST_TENSORS_PER_WEIGHT = 1024
"""Most tensors of a group: a fused weight of 512 experts may be stored as a tensor per expert and projection."""


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
        self._model = model
        self.groups = self._find_groups(source, dtype)
        self._group_of = {name: group for group in self.groups for name in group.targets}
        names = [base_name(name) for name, _ in model.named_parameters() if not is_adapter(name)]
        self.twins = _find_missing(source, model, names, self._group_of)
        """Names of weights that the files have under another name of the same parameter."""

    def _find_groups(self, source: ModelSource, dtype: torch.dtype) -> list[WeightGroup]:
        if source.gguf_file is not None:
            groups, self.unread = gguf_weights(source, self._model)
            return groups
        self.stored = find_stored(source.folder, dtype)
        for name in conv1d_names(self._model) & self.stored.keys():
            if (weight := self.stored[name]).is_quantized:
                shape = torch.Size(reversed(weight.shape))
                self.stored[name] = replace(weight, shape=shape, is_turned=True, packed_as=None)
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
        return WeightGroup(conversion.targets, conversion.sources, read, stored, conversion)

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self.twins.get(name, name)
        with OpenFiles() as files:
            return self._group_of[name].read(files, None)[name].clone()

    def group_of(self, name: str) -> WeightGroup:
        """The group that a weight is read with."""
        return self._group_of[self.twins.get(name, name)]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a weight as it is read; does not read it where a file's header says it."""
        group = self.group_of(name)
        return next(iter(group.stored.values())).dtype if group.stored else torch.float32

    def __iter__(self) -> Iterator[str]:
        return iter([*self._group_of, *self.twins])

    def __len__(self) -> int:
        return len(self._group_of) + len(self.twins)


def _find_missing(
    source: ModelSource, model: nn.Module, names: list[str], found: Mapping[str, WeightGroup]
) -> dict[str, str]:
    """Names that the files do not have -> another name of the same parameter that they have."""
    tied, lacking = tied_names(model), [name for name in names if name not in found]
    twins = {name: next((other for other in tied.get(name, ()) if other in found), "") for name in lacking}
    missing = [name for name, twin in twins.items() if not twin]
    if missing:
        raise RefusedError(
            "weights of the architecture are missing",
            where=source.name,
            found=f"{len(missing)} missing, for instance {', '.join(missing[:3])}",
            hint=BY_CONFIG if source.gguf_file is None else None,
        )
    return twins


SetParameter = Callable[[str, torch.Tensor], None]
SetPacked = Callable[[str, PackedWeight], None]


def load_weights(
    source: ModelSource,
    model: nn.Module,
    set_parameter: SetParameter,
    set_packed: SetPacked | None = None,
    *,
    packed: Collection[str] = (),
    new: NewTokens | None = None,
) -> list[str]:
    """Pass every base weight of `model` (a skeleton, adapters included) to `set_parameter`, and fill its buffers.
    Returns notices about what the files hold.

    Args:
        set_packed: takes those that stay as the files have them packed.
        packed: their names, of `packed_names`; all others are unpacked for `set_parameter`.
        new: tokens whose rows the files do not have, or not for them.

    Raises:
        RefusedError: missing or misshapen tensors, values that are not finite, unreadable files.
    """
    parameters = {base_name(name): (name, p) for name, p in model.named_parameters() if not is_adapter(name)}
    dtype = next(p.dtype for _, p in parameters.values() if p.is_floating_point())
    base = BaseWeights(source, model, dtype)
    read = {name: next(iter(group.targets)) for group in base.groups for name in group.sources}
    left_out = check_unread(model, source.name, base.unread, read)
    buffers = _buffers(model)
    twins = {found: name for name, found in base.twins.items()}
    tables = {base_name(name) for name in table_names(model)} if new is not None and new.ids else set()

    def put(name: str, weight: torch.Tensor | PackedWeight) -> None:
        own, parameter = parameters[name]
        with at_work(f"loading {name}"):
            fault("load")
            if new is not None and name in tables and isinstance(weight, torch.Tensor):
                weight = with_new_rows(weight, len(parameter), new)
            _check(weight, parameter, f"{source.name}: {name}")
            if isinstance(weight, torch.Tensor):
                set_parameter(own, weight)
            elif set_packed is not None:
                set_packed(own, weight)

    num_kept = 0
    with OpenFiles() as files:
        for group in base.groups:
            files.close_if_read()
            first = next(iter(group.targets))
            with at_work(f"loading {first}"):
                if first in parameters and parameters[first][0] in packed:
                    num_kept += len(group.sources)
                    put(first, _read_packed(group, model, files))
                    continue
                weights = group.read(files, dtype)
            for name, tensor in weights.items():
                for buffer in buffers.get(name, ()):
                    buffer.copy_(tensor)
                if name not in buffers and twins.get(name, name) in parameters:  # its other name may be the model's
                    put(twins.get(name, name), tensor)
    dequantized = sum(weight.is_quantized for weight in base.stored.values()) - num_kept
    said = f"{dequantized} weights are quantised in the files and dequantised while loading" if dequantized else None
    return [text for text in (left_out, said) if text]


def fill_buffers(source: ModelSource, model: nn.Module) -> None:
    """Fill the buffers of `model` (a skeleton, adapters included) that the base's files hold."""
    buffers = _buffers(model)
    with OpenFiles() as files:
        for group in BaseWeights(source, model, torch.float32).groups:
            if buffers.keys() & group.targets.keys():
                for name, tensor in group.read(files, torch.float32).items():
                    for buffer in buffers.get(name, ()):
                        buffer.copy_(tensor)


def _buffers(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Buffers by their names in the base: one, and its copy in a module that is saved whole."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, buffer in model.named_buffers():
        found.setdefault(base_name(re.sub(SAVED_WHOLE, "", name)), []).append(buffer)
    return found


def _stays_packed(group: WeightGroup) -> PackedName | None:
    """Format in which the group's one weight can stay as the files have it."""
    (kind, *others) = {weight.packed_as for weight in group.stored.values()} or (None,)
    conversion = group.conversion
    if others or kind is None or conversion is None:
        return None
    keeps = (
        conversion.rule is None if kind == "4bit" else conversion.keeps_blocks(w.shape for w in group.stored.values())
    )
    return kind if keeps else None


def _read_packed(group: WeightGroup, model: nn.Module, files: OpenFiles) -> PackedWeight:
    """The group's one weight as the files have it."""
    first, conversion = next(iter(group.stored.values())), group.conversion
    if first.packed_as in (None, "4bit") or conversion is None:
        return read_nf4(first, files)
    ((name, shape),) = group.targets.items()

    def parts(part: Callable[[StoredTensor, OpenFiles], torch.Tensor]) -> torch.Tensor:
        return conversion.apply(lambda source: part(group.stored[source], files), model)[name]

    codes, scales = parts(stored_codes), parts(stored_scales)
    return PackedWeight(codes, scales, first.shape if conversion.rule is None else shape, first.dtype, first.packed_as)


def packed_names(source: ModelSource, model: nn.Module, kind: PackedName) -> frozenset[str]:
    """Names in `model`, adapters included, of the weights that can stay in `kind`, in which the files have them.

    Raises:
        RefusedError: the files have weights in bitsandbytes' 4 bit that cannot.
    """
    names = {base_name(name): name for name, _ in model.named_parameters() if not is_adapter(name)}
    found = set()
    for group in BaseWeights(source, model, torch.float32).groups:
        first = next(iter(group.targets))
        if _stays_packed(group) == kind:
            found |= {names[first]} if first in names else set()
        elif kind == "4bit" and any(weight.is_quantized for weight in group.stored.values()):
            raise RefusedError(
                "the files hold this architecture's weights in another arrangement, which cannot be read in 4 bit",
                where=source.name,
                expected=WHAT_WORKS,
            )
    return frozenset(found)


def _check(weight: torch.Tensor | PackedWeight, parameter: nn.Parameter, where: str) -> None:
    if weight.shape != parameter.shape:
        raise RefusedError(
            "a weight has another shape than the architecture",
            where=where,
            found=str(list(weight.shape)),
            expected=str(list(parameter.shape)),
        )
    if isinstance(weight, torch.Tensor) and weight.dtype.itemsize == 1:  # without its scales, which are unknown here
        raise RefusedError(
            "a base weight is quantised in a form that cannot be read",
            where=where,
            found=str(weight.dtype).removeprefix("torch."),
            expected=WHAT_WORKS,
        )
    if isinstance(weight, PackedWeight):
        weight.check_finite(parameter.dtype, where)
    else:
        check_finite(weight, parameter.dtype, where)


def save_model(model: nn.Module, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a full model in Hugging Face format, from `weights` by parameter name of the skeleton `model`."""
    state = {base_name(name): tensor for name, tensor in weights.items()}
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            state[name] = buffer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder), state_dict=state, safe_serialization=True)  # type: ignore[operator]
