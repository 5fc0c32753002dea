"""From the result of a run to a folder for other programs: the adapter as it is, or merged into the base model.

Merging goes module by module: the base weights of one adapted module are read, PEFT's own merge adds the adapter in
float32, the sum is written into a shard, and nothing stays in memory. The folder appears under its name only when it
is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.files import (
    TEMPORARY_PREFIX,
    disk_error,
    remove_tree,
    require_free_bytes,
    sync_folder,
    write_new_file,
)
from roundpipe_cli.model.adapter_files import ADAPTER_CONFIG, check_adapter_folder
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import check_file, check_model_folder
from roundpipe_cli.model.load import build_skeleton, has_tokenizer, load_config, load_tokenizer
from roundpipe_cli.model.stored.formats import untie_stored
from roundpipe_cli.model.weights_io import BaseWeights
from roundpipe_cli.train.checkpoint.output_dir import RESULT_FOLDER_MODE
from roundpipe_cli.train.checkpoint.safetensors_stream import TensorSpec, TensorStream, stream_file
from roundpipe_cli.train.result.base_files import ESCAPED, GENERATION_CONFIG, OTHER_NAMES, BaseFiles, read_base_files
from roundpipe_cli.train.result.merged_tensors import MergedTensors
from roundpipe_cli.train.result.model_card import model_card
from roundpipe_cli.train.result.ollama import modelfile

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of a shard, as transformers had it for years: small enough for every file system and download."""
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
    """Whether the chat template could be written in Ollama's language; set when it is written."""
    has_tokenizer: bool = True
    """Whether the copied result has one; set when it is copied."""
    added_ends: list[str] = field(default_factory=list)
    """End tokens that the base model's settings did not have; set when they are written."""

    def write(self, result: Path, folder: Path, tokenizer: Any, *, whole: bool) -> None:
        """Model card, and for whole weights a Modelfile."""
        usage = "Load it with transformers, vLLM or, by the Modelfile, Ollama." if whole else "Load it with PEFT."
        card = model_card(result, base=self.base, merged=whole, usage=usage)
        write_new_file(folder / "README.md", [card.encode(errors=ESCAPED)], FILE_MODE)
        if whole:
            settings = folder / GENERATION_CONFIG
            generation = json.loads(settings.read_bytes()) if settings.exists() else {}
            text, self.has_template = modelfile(tokenizer, self.model_file, generation)
            write_new_file(folder / "Modelfile", [text.encode(errors=ESCAPED)], FILE_MODE)


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
        extras.has_tokenizer = is_whole or has_tokenizer(result)
        tokenizer = _save_tokenizer(result, temporary) if extras.has_tokenizer else None
        extras.write(result, temporary, tokenizer, whole=is_whole)


RESULT_NAMES = (ADAPTER_CONFIG, "config.json", GENERATION_CONFIG, *OTHER_NAMES)


def _is_index(path: Path) -> bool:
    return path.name.endswith(".safetensors.index.json")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(8 * 1024**2):
            yield chunk


def _save_tokenizer(result: Path, folder: Path, base: ModelSource | None = None) -> Any:
    """Save a result's tokenizer, or its base's where it has none, into `folder`."""
    source = ModelSource(str(result), result) if base is None or has_tokenizer(result) else base
    tokenizer = load_tokenizer(source)
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
    dequantized: tuple[str, ...]
    """Names, as `layers.*`, of the weights that the base's files hold quantised and the result does not."""
    has_base_names: bool
    """Whether the tensors are those of the base's files; else they are the model's own."""
    untied: tuple[str, ...] = ()
    """Names of weights that the base shares with another, and the result does not."""
    replaced: tuple[str, ...] = ()
    """Names of the base's weights for which the adapter's file has others."""


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
        result: a folder with an adapter in PEFT's format; where it has no tokenizer, the base's is taken.
        source: the base model.
        dtype: of the weights written; None keeps that of the base's files, bfloat16 for GGUF; for dequantised weights
            that of the base's configuration.

    Raises:
        RefusedError: `folder` exists, the adapter does not fit the base, or one of them cannot be read.
        ResourceError: disk full or failing.
    """
    _return_freed_memory()
    with Destination(folder) as temporary:
        config = load_config(source)
        base_files = read_base_files(source, config)
        own_dtype = _own_dtype(config)  # a skeleton's own replaces it
        model = build_skeleton(config, torch.float32)
        if source.gguf_file is None:
            untie_stored(model, source.folder)
        base = BaseWeights(source, model, own_dtype)
        merging = MergedTensors(model, base, result, dtype or (torch.bfloat16 if source.gguf_file else None))
        require_free_bytes(temporary, sum(spec.num_bytes for spec in merging.specs), "the merged model")
        shards = split_shards(merging.specs, max_shard_bytes)
        for name, specs in shards.items():
            stream = TensorStream(tuple(specs), merging.tensors(specs), {"format": "pt"})
            write_new_file(temporary / name, stream_file(stream), FILE_MODE)
        _write_index(temporary, shards)
        tokenizer = _save_tokenizer(result, temporary, source)
        extras = extras or Extras(None)
        base_files, extras.added_ends = base_files.ending_as_trained(tokenizer)
        if merging.untied:
            _untie(model)
        _write_configs(model, merging.main_dtype, base_files, temporary)
        extras.write(result, temporary, tokenizer, whole=True)
    total = sum(spec.num_bytes for spec in merging.specs)
    quantized = [name for name, weight in base.stored.items() if weight.is_quantized]
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in quantized)
    return Merged(
        merging.num_modules,
        total,
        len(shards),
        tuple(patterns),
        merging.has_base_names,
        tuple(merging.untied),
        tuple(merging.replaced),
    )


def _own_dtype(config: Any) -> torch.dtype:
    """The type in which a model's configuration has its weights."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.bfloat16


def _return_freed_memory() -> None:
    """Let glibc return freed tensors at once: by default it raises its limit for that with every large block that
    is freed, and the pieces left between live ones add up to more than a shard."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


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


def _untie(model: nn.Module) -> None:
    """Have the configuration say that embedding and LM head are two tables."""
    config: Any = model.config
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False


def _write_configs(model: nn.Module, dtype: torch.dtype, base_files: BaseFiles, folder: Path) -> None:
    config: Any = model.config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    for name, content in base_files.contents((folder / "config.json").read_bytes()).items():
        (folder / name).unlink(missing_ok=True)
        write_new_file(folder / name, [content], FILE_MODE)
