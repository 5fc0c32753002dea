"""Weights from and to disk, layer by layer: the host never holds a second copy.

Safetensors whose names are the model's own are copied tensor by tensor from the mapped file into the store. Two kinds
of checkpoint pass through transformers' own loader, which needs the whole model once more while loading: those whose
tensors are laid out otherwise (per-expert files of fused experts) and GGUF files (dequantised whole).
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.model.architectures import WHAT_WORKS
from roundpipe_cli.model.auto_class import auto_class
from roundpipe_cli.model.quantized_files import (
    PARTS,
    STATE,
    PackedWeight,
    quantization_of,
    read_packed,
    stored_in_4bit,
)
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.untrusted import check_file, check_header, file_tensor_bytes, find_shards
from roundpipe_cli.watchdog import at_work

SetParameter = Callable[[str, torch.Tensor], None]
SetPacked = Callable[[str, PackedWeight], None]
FINITE_CHECK_ELEMENTS = 2**20
MOST_TENSORS_PER_WEIGHT = 2048
"""A fused weight of experts may come as a file per expert and projection; more is no model's."""


def base_name(name: str) -> str:
    """The name of a base weight before adapters were put around it."""
    return name.replace(".base_layer", "").replace(".original_module", "")


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's: low-rank factors, magnitudes, or a module that is saved whole."""
    return ".lora_" in name or ".modules_to_save." in name


def load_weights(
    source: ModelSource, model: nn.Module, set_parameter: SetParameter, set_packed: SetPacked | None = None
) -> str | None:
    """Hand every base weight of `model` (a skeleton, adapters included) to `set_parameter`, and fill its buffers.

    Args:
        set_packed: takes the weights that lie in the files in 4 bit; None: they are unpacked for `set_parameter`.

    Returns:
        a notice, where loading needed more memory than the weights.

    Raises:
        RefusedError: missing or misshapen tensors, values that are not finite, unreadable files.
    """
    names = {base_name(name): name for name, _ in model.named_parameters() if not is_adapter(name)}
    shapes = {base_name(name): p.shape for name, p in model.named_parameters() if not is_adapter(name)}
    checked = _Checked(source.name, names, shapes, set_parameter)
    if source.gguf_file is None:
        places = find_places(source.folder, model, set(names))
        if places is not None:
            packed = packed_parts(source, places)
            for name in sorted(packed):
                weight = read_packed_weight(places[name], packed[name])
                if set_packed is not None:
                    checked.put_packed(name, weight, set_packed)
                else:
                    checked.put(name, weight.dequantized())
            _load_directly({name: place for name, place in places.items() if name not in packed}, model, checked)
            return None
        if stored_in_4bit(source):
            raise RefusedError(
                "the files hold this architecture's weights in another arrangement, which cannot be read in 4 bit",
                where=source.name,
                expected=WHAT_WORKS,
            )
        _refuse_too_small(source, shapes)
    _load_through_transformers(source, model, checked)
    kind = "GGUF is dequantised whole" if source.gguf_file else "this checkpoint's experts are fused while loading"
    return f"loading needed about twice the weights' memory: {kind}"


def _refuse_too_small(source: ModelSource, shapes: Mapping[str, torch.Size]) -> None:
    """Files that could not hold the weights even in 4 bit: cheaper to tell than by loading all they have."""
    found = sum(map(file_tensor_bytes, find_shards(source.folder)))
    needed = sum(shape.numel() for shape in shapes.values()) // 2
    if found < needed:
        raise RefusedError(
            "weights of the architecture are missing",
            where=source.name,
            found=f"{found} bytes of tensors",
            expected=f"at least {needed}",
        )


class _Checked:
    """Checks a tensor and hands it on under the skeleton's name."""

    def __init__(
        self, where: str, names: Mapping[str, str], shapes: Mapping[str, torch.Size], set_parameter: SetParameter
    ) -> None:
        self._where, self._names, self._shapes, self._set = where, names, shapes, set_parameter

    def put(self, name: str, tensor: torch.Tensor) -> None:
        with at_work(f"loading {name}"):
            fault("load")
            self._put(name, tensor)

    def put_packed(self, name: str, weight: PackedWeight, set_packed: SetPacked) -> None:
        with at_work(f"loading {name}"):
            fault("load")
            self._check_shape(name, weight.shape)
            if not bool(torch.isfinite(weight.scales).all()):
                raise RefusedError("a base weight is not finite (NaN or infinite)", where=f"{self._where}: {name}")
            set_packed(self._names[name], weight)

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        if shape != self._shapes[name]:
            raise RefusedError(
                "a weight has another shape than the architecture",
                where=f"{self._where}: {name}",
                found=str(list(shape)),
                expected=str(list(self._shapes[name])),
            )

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._check_shape(name, tensor.shape)
        if tensor.dtype.itemsize == 1:  # without its scales, which nothing here knows of
            raise RefusedError(
                "a base weight is quantised in a form that cannot be read",
                where=f"{self._where}: {name}",
                found=str(tensor.dtype).removeprefix("torch."),
                expected=WHAT_WORKS,
            )
        # In parts: a check of the whole would hold a copy of a large tensor.
        if not all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(FINITE_CHECK_ELEMENTS)):
            raise RefusedError("a base weight is not finite (NaN or infinite)", where=f"{self._where}: {name}")
        self._set(self._names[name], tensor)


def open_shard(path: Path) -> Any:
    """A safetensors file, mapped; a context manager.

    Raises:
        RefusedError: it cannot be read.
    """
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise RefusedError("a file of the weights cannot be read", where=str(path), found=str(error)) from error


def find_places(folder: Path, model: nn.Module, names: set[str]) -> dict[str, tuple[Path, str]] | None:
    """Name in the model -> (file, name in the file); None if the files do not hold the model's tensors as they are.

    Raises:
        RefusedError: an index or a file that cannot be read.
    """
    shards = find_shards(folder)
    for path in shards:
        check_file(path, None)
        check_header(path)
    return _match(shards, model, names)


WeightParts = Mapping[str, tuple[Path, str]]
"""Suffix -> (file, name in the file) of what lies beside a weight in 4 bit."""


def packed_parts(source: ModelSource, places: Mapping[str, tuple[Path, str]]) -> dict[str, WeightParts]:
    """Weights that lie in the files in bitsandbytes' 4 bit: base name -> what lies beside them.

    Raises:
        RefusedError: the files are quantised in a form that cannot be read.
    """
    if not stored_in_4bit(source):
        return {}
    beside: dict[str, dict[str, tuple[Path, str]]] = defaultdict(dict)
    for path in find_shards(source.folder):  # a weight and its scales may be in two of them
        with open_shard(path) as file:
            for key in file.keys():  # noqa: SIM118 - the handle is no mapping
                for suffix in PARTS:
                    if key.endswith(f".{suffix}"):
                        beside[key.removesuffix(f".{suffix}")][suffix] = (path, key)
    return {name: beside[key] for name, (_, key) in places.items() if STATE in beside.get(key, {})}


def packed_names(source: ModelSource, model: nn.Module) -> frozenset[str]:
    """Names in `model`, adapters included, of the weights that lie in the files in 4 bit."""
    names = {base_name(name): name for name, _ in model.named_parameters() if not is_adapter(name)}
    places = find_places(source.folder, model, set(names))
    return frozenset(names[name] for name in packed_parts(source, places or {}) if name in names)


def read_packed_weight(place: tuple[Path, str], parts: WeightParts) -> PackedWeight:
    """One weight in 4 bit, from the files.

    Raises:
        RefusedError: it is not as bitsandbytes writes it.
    """

    def read(path: Path, key: str) -> torch.Tensor:
        with open_shard(path) as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor.clone()

    found = {suffix: read(path, key) for suffix, (path, key) in parts.items()}
    return read_packed(read(*place), found, f"{place[0]}: {place[1]}")


def _match(shards: list[Path], model: nn.Module, names: set[str]) -> dict[str, tuple[Path, str]] | None:
    """Base name -> (file, name in the file), or None if the files do not hold the model's tensors as they are."""
    prefix = str(getattr(model, "base_model_prefix", "")) + "."
    buffers = {name for name, _ in model.named_buffers()}
    found: dict[str, tuple[Path, str]] = {}
    num_tensors = 0
    for path in shards:
        with open_shard(path) as file:
            num_tensors += len(file.keys())
            for key in file.keys():  # noqa: SIM118 - the handle is no mapping
                for name in (key, prefix + key, key.removeprefix(prefix)):
                    if name in names or name in buffers:
                        found[name] = (path, key)
                        break
    if num_tensors > MOST_TENSORS_PER_WEIGHT * len(names):
        raise RefusedError(
            "the files hold far more tensors than the architecture has weights",
            where=str(shards[0].parent),
            found=str(num_tensors),
            expected=f"about {len(names)}",
        )
    tied = tied_names(model)
    for name in names - found.keys():
        twin = next((other for other in tied.get(name, ()) if other in found), None)
        if twin is None:
            return None
        found[name] = found[twin]
    return found


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Parameter name -> other names of the same parameter."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(base_name(name))
    return {name: [n for n in group if n != name] for group in groups.values() for name in group if len(group) > 1}


def _load_directly(places: dict[str, tuple[Path, str]], model: nn.Module, checked: _Checked) -> None:
    buffers = dict(model.named_buffers())
    by_block: dict[tuple[Path, str], list[tuple[str, str]]] = defaultdict(list)
    for name, (path, key) in places.items():
        # The file is mapped anew for each block: its pages, once read, would count until it is closed.
        block = re.match(r"^.*?\.\d+\.", name)
        by_block[path, block.group(0) if block else name].append((name, key))
    for (path, _), entries in by_block.items():
        with open_shard(path) as file:
            for name, key in entries:
                if name in buffers:
                    buffers[name].copy_(file.get_tensor(key))
                else:
                    checked.put(name, file.get_tensor(key))


def _load_through_transformers(source: ModelSource, model: nn.Module, checked: _Checked) -> None:
    from transformers import Mxfp4Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    arguments: dict[str, Any] = {"use_safetensors": True} if source.gguf_file is None else source.load_arguments
    if source.gguf_file is None and quantization_of(source).get("quant_method") == "mxfp4":
        arguments["quantization_config"] = Mxfp4Config(dequantize=True)  # else kernels from the hub are tried
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded, info = auto_class(model.config).from_pretrained(
                str(source.folder), dtype=dtype, trust_remote_code=False, output_loading_info=True, **arguments
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        hint = "pip install gguf sentencepiece" if isinstance(error, ImportError) else None
        raise RefusedError(
            "the model's weights cannot be loaded",
            where=source.name,
            found=f"{type(error).__name__}: {str(error).splitlines()[0][:300]}",
            hint=hint,
        ) from error
    missing = sorted(str(key) for key in info.get("missing_keys", ()))
    if missing:
        raise RefusedError(
            "weights of the architecture are missing",
            where=source.name,
            found=f"{len(missing)} missing, for instance {', '.join(missing[:3])}",
        )
    for name, parameter in loaded.named_parameters():
        checked.put(name, parameter.detach())
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    own = dict(model.named_buffers())
    for name, buffer in loaded.named_buffers():
        if base_name(name) in own:
            own[base_name(name)].copy_(buffer)


def save_model(model: nn.Module, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a full model in Hugging Face format, from `weights` by parameter name of the skeleton `model`."""
    state = {base_name(name): tensor for name, tensor in weights.items()}
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            state[name] = buffer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder), state_dict=state, safe_serialization=True)  # type: ignore[operator]
