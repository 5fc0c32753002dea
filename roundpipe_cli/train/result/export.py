"""From the result of a run to a folder for other programs: the adapter as it is, or merged into the base model.

Merging goes module by module: the base weights of one adapted module are read, PEFT's own merge adds the adapter in
float32, the sum is written into a shard, and nothing stays in memory. The folder appears under its name only when it
is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.durable import (
    TEMPORARY_PREFIX,
    disk_error,
    remove_tree,
    require_free_bytes,
    sync_folder,
    write_new_file,
)
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.model.adapter_checks import ADAPTER_CONFIG, check_adapter_folder
from roundpipe_cli.model.adapter_files import put_adapter, read_adapter_config, read_adapter_tensors
from roundpipe_cli.model.base_weights import BaseWeights
from roundpipe_cli.model.library_calls import refusing
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.untrusted import check_file, check_model_folder, check_small_files
from roundpipe_cli.model.weights_io import base_name, is_adapter
from roundpipe_cli.train.checkpoint.output_dir import RESULT_FOLDER_MODE
from roundpipe_cli.train.checkpoint.safetensors_stream import TensorSpec, TensorStream, stream_file
from roundpipe_cli.train.result.base_files import GENERATION_CONFIG, OTHER_NAMES, BaseFiles, read_base_files
from roundpipe_cli.train.result.model_card import model_card
from roundpipe_cli.train.result.ollama import modelfile

MAX_SHARD_BYTES = 5_000_000_000
"""As save_pretrained had it for years: small enough for every file system and download."""
M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 2**20
"""glibc's malloc.h."""
FILE_MODE = 0o644


class Destination:
    """A new folder that is built under a temporary name; a context manager that gives the temporary folder."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            RefusedError: there is something at `folder` already.
        """
        self._folder = folder
        self._temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
        if folder.exists() or folder.is_symlink():
            raise RefusedError(
                "the folder to export to exists already",
                where=str(folder),
                expected="a new folder",
                hint="name another one with --to",
            )

    def __enter__(self) -> Path:
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            if self._temporary.exists():
                remove_tree(self._temporary)
            self._temporary.mkdir()
        except OSError as error:
            raise RefusedError(
                "the folder to export to cannot be made", where=str(self._folder), found=error.strerror
            ) from error
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for path in self._temporary.rglob("*"):
                    path.chmod(RESULT_FOLDER_MODE if path.is_dir() else FILE_MODE)
                self._temporary.chmod(RESULT_FOLDER_MODE)
                sync_folder(self._temporary)
                fault("export")
                self._temporary.rename(self._folder)
                sync_folder(self._folder.parent)
                return
        except OSError as problem:
            error = problem
        shutil.rmtree(self._temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_error(error, self._folder, "the export") from error


@dataclass
class Extras:
    """Files beside the weights for those who use them."""

    base: str | None
    """Name of the base model."""
    model_file: str = "."
    """File or folder that the Modelfile loads."""
    has_template: bool = False
    """Whether Ollama's language could say the chat template; set when it is written."""
    added_ends: list[str] = field(default_factory=list)
    """End tokens that the base model's settings did not have; set when they are written."""

    def write(self, result: Path, folder: Path, tokenizer: Any, *, whole: bool) -> None:
        """Model card, and for whole weights a Modelfile."""
        usage = "Load it with transformers, vLLM or, by the Modelfile, Ollama." if whole else "Load it with PEFT."
        card = model_card(result, base=self.base, merged=whole, usage=usage)
        write_new_file(folder / "README.md", [card.encode()], FILE_MODE)
        if whole:
            settings = folder / GENERATION_CONFIG
            generation = json.loads(settings.read_bytes()) if settings.exists() else {}
            text, self.has_template = modelfile(tokenizer, self.model_file, generation)
            write_new_file(folder / "Modelfile", [text.encode()], FILE_MODE)


def copy_result(result: Path, folder: Path, extras: Extras) -> None:
    """The adapter or model of a run as it is, without the run's own files.

    Raises:
        ResourceError: disk full or failing.
        RefusedError: `folder` exists, or a file is not safe to open.
    """
    if (result / ADAPTER_CONFIG).is_file():
        check_adapter_folder(result)
    else:
        check_model_folder(result)
    with Destination(folder) as temporary:
        for path in sorted(result.iterdir()):
            if path.is_file() and (path.suffix == ".safetensors" or path.name in RESULT_NAMES or _is_index(path)):
                check_file(path, None)
                write_new_file(temporary / path.name, _chunks(path), FILE_MODE)
        is_whole = not (result / ADAPTER_CONFIG).is_file()
        extras.write(result, temporary, _save_tokenizer(result, temporary), whole=is_whole)


RESULT_NAMES = (ADAPTER_CONFIG, "config.json", GENERATION_CONFIG, *OTHER_NAMES)


def _is_index(path: Path) -> bool:
    return path.name.endswith(".safetensors.index.json")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(8 * 1024**2):
            yield chunk


def _save_tokenizer(result: Path, folder: Path) -> Any:
    from transformers import AutoTokenizer

    check_small_files(result)
    with refusing("the tokenizer cannot be loaded", str(result)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(str(result), trust_remote_code=False)
        tokenizer.save_pretrained(str(folder))
        return tokenizer


# --- merging --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """Summary of a written export."""

    num_modules: int
    """Modules whose weights the adapter changed."""
    num_bytes: int
    num_shards: int
    whole: bool
    """Whether the base model had to be loaded whole (its files lay experts out otherwise)."""


def merge_result(
    result: Path,
    source: ModelSource,
    folder: Path,
    dtype: torch.dtype | None,
    extras: Extras | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Merged:
    """Write base model and adapter as one model in Hugging Face format.

    Args:
        result: a folder with an adapter in PEFT's format and the tokenizer.
        source: the base model.
        dtype: of the weights written; None keeps that of the base's files, bfloat16 for GGUF.

    Raises:
        RefusedError: `folder` exists, the adapter does not fit the base, or one of them cannot be read.
        ResourceError: disk full or failing.
    """
    _return_freed_memory()
    with Destination(folder) as temporary:
        config = load_config(source)
        base_files = read_base_files(source, config)
        model = build_skeleton(config, torch.float32)
        base = BaseWeights(source, model)
        merging = _Merging(model, base, result, dtype or (torch.bfloat16 if source.gguf_file else None))
        require_free_bytes(temporary, sum(spec.num_bytes for spec in merging.specs), "the merged model")
        shards = split_shards(merging.specs, max_shard_bytes)
        for name, specs in shards.items():
            stream = TensorStream(tuple(specs), merging.tensors(specs), {"format": "pt"})
            write_new_file(temporary / name, stream_file(stream), FILE_MODE)
        _write_index(temporary, shards)
        tokenizer = _save_tokenizer(result, temporary)
        extras = extras or Extras(None)
        base_files, extras.added_ends = base_files.ending_as_trained(tokenizer)
        _write_configs(model, merging.main_dtype, base_files, temporary)
        extras.write(result, temporary, tokenizer, whole=True)
    total = sum(spec.num_bytes for spec in merging.specs)
    return Merged(merging.num_modules, total, len(shards), base.whole)


def _return_freed_memory() -> None:
    """Have glibc give freed tensors back at once: by default it raises its limit for that with every large block that
    is freed, and the pieces left between live ones add up to more than a shard."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


class _Merging:
    """Base weights on demand, those of adapted modules with the adapter added."""

    def __init__(self, model: nn.Module, base: BaseWeights, result: Path, dtype: torch.dtype | None) -> None:
        self._model, self._base, self._dtype = model, base, dtype
        state = model.state_dict()
        buffers = dict(model.named_buffers())
        names = [name for name, _ in model.named_parameters()] + [name for name in state if name in buffers]
        self._buffers = {name: buffers[name] for name in names if name in buffers}
        self._adapter = adapt(model, result)
        self._units = dict(_units(model))
        self._unit_of = {
            base_name(f"{path}.{inner}"): path
            for path, unit in self._units.items()
            for inner, _ in unit.named_parameters()
            if not is_adapter(f".{inner}")
        }
        self._saved_whole = {
            name.replace(".modules_to_save.default", ""): name for name in self._adapter if ".modules_to_save." in name
        }
        self._current: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self.specs = [TensorSpec(name, self._dtype_of(name), tuple(state[name].shape)) for name in names]
        # Larger elements first, as the format's alignment wants it; otherwise the model's order, so that a module
        # is merged once.
        self.specs.sort(key=lambda spec: -spec.dtype.itemsize)
        sizes: dict[torch.dtype, int] = {}
        for spec in self.specs:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
        self.main_dtype = max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_modules(self) -> int:
        return len(self._units) + len(self._saved_whole)

    def _dtype_of(self, name: str) -> torch.dtype:
        if name in self._buffers and name not in self._base:
            return self._buffers[name].dtype
        if self._dtype is not None and name not in self._buffers:
            return self._dtype
        return self._base.dtype(name)

    def tensors(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            fault("export")
            path = self._unit_of.get(spec.name)
            if spec.name in self._saved_whole:
                yield spec.name, self._adapter[self._saved_whole[spec.name]].to(spec.dtype)
            elif path is not None:
                yield spec.name, self._merged(path)[spec.name].to(spec.dtype)
            elif spec.name in self._base:
                yield spec.name, self._base[spec.name].to(spec.dtype)
            else:
                yield spec.name, self._buffers[spec.name]

    def _merged(self, path: str) -> dict[str, torch.Tensor]:
        """The base weights of one adapted module with the adapter added, float32."""
        if self._current[0] == path:
            return self._current[1]
        self._current = ("", {})
        unit = self._units[path]
        real: dict[str, torch.Tensor] = {}
        for module_path, module in unit.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = ".".join(part for part in (path, module_path, attribute) if part)
                    values = self._adapter[name] if is_adapter(name) else self._base[base_name(name)]
                    module._parameters[attribute] = nn.Parameter(values.float(), requires_grad=False)
        for _, module in unit.named_modules():
            if hasattr(module, "merged_adapters"):
                module.merge(safe_merge=True)
        for module_path, module in unit.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = ".".join(part for part in (path, module_path, attribute) if part)
                    if not is_adapter(name):
                        real[base_name(name)] = parameter.detach()
                    module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        self._current = (path, real)
        return real


def adapt(model: nn.Module, result: Path) -> Mapping[str, torch.Tensor]:
    """Put the adapter's modules into the skeleton `model`; returns its tensors by parameter name.

    Raises:
        RefusedError: it cannot be read, or does not fit the model.
    """
    config = read_adapter_config(result)
    config.inference_mode = True
    put_adapter(model, config, result)
    return read_adapter_tensors(model, result)


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that an adapter wraps."""
    last = None
    for path, module in model.named_modules():
        inside = last is not None and path.startswith(last + ".")
        if hasattr(module, "merged_adapters") and hasattr(module, "lora_A") and not inside:
            last = path
            yield path, module


def split_shards(specs: Sequence[TensorSpec], max_bytes: int) -> dict[str, list[TensorSpec]]:
    """File name -> its tensors; a file has at most `max_bytes` of them, or one tensor."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def _write_index(folder: Path, shards: Mapping[str, Sequence[TensorSpec]]) -> None:
    if len(shards) == 1:
        return
    total = sum(spec.num_bytes for specs in shards.values() for spec in specs)
    weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
    content = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
    write_new_file(folder / "model.safetensors.index.json", [content], FILE_MODE)


def _write_configs(model: nn.Module, dtype: torch.dtype, base_files: BaseFiles, folder: Path) -> None:
    config: Any = model.config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    for name, content in base_files.contents((folder / "config.json").read_bytes()).items():
        (folder / name).unlink(missing_ok=True)
        write_new_file(folder / name, [content], FILE_MODE)
