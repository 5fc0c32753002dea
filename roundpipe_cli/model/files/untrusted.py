"""The allowed contents of a model folder, checked before any library opens a file: by names, JSON and headers only.

A model comes from elsewhere. Nothing of it is ever executed, and nothing outside its folder is read for it:

- weights are safetensors, whose header their library checks in full; pickles are not opened at all
- configurations must not ask for code: no `auto_map`, no kernels by name, no adapter that leads to another model
- every file is a regular file of the folder, or a blob of the hub's own cache
- headers and configurations have a size limit, so that reading them takes neither long nor much memory

Needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from roundpipe_cli.costs.models import read_with_modelopt
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.regular_files import kind_of_file, stays_inside
from roundpipe_cli.sizes import check_sizes
from roundpipe_cli.units import format_bytes

SHARD_NAME = re.compile(r"^[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors$")
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 10 * 1024**2
MAX_TENSORS = 1 << 16
"""Tensors of one file. The experts of 94 layers, 128 each with three matrices, are 36,096 if one file has them all."""
MAX_INDEX_BYTES = 50 * 1024**2
MAX_CONFIG_BYTES = 10 * 1024**2
MAX_TOKENIZER_BYTES = 256 * 1024**2
COMPARED_BYTES = 8 * 1024**2
"""Read at once of each of two tensors that are compared."""

CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "processor_config.json", "preprocessor_config.json", "chat_template.json"),
)
SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab")
"""Endings of configurations, tokenizers and chat templates."""
TEMPLATES_FOLDER = "additional_chat_templates"
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations that are part of transformers; any other name is a kernel from the hub."""


PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.msgpack", "*.h5", "*.tar", "*.7z", "*.zip")


def check_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Refuse a folder that cannot be loaded safely; without `weights` only its configuration and tokenizer are loaded.

    Raises:
        RefusedError: no config.json, no safetensors, anything that would run code or lead out of the folder, a damaged
            header.
    """
    if (folder / "adapter_config.json").exists():
        raise adapter_refusal(str(folder))
    check_small_files(folder)
    if not (folder / "config.json").exists():
        raise _missing(folder / "config.json")
    if not weights:
        return
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise no_weights_refusal([path.name for path in folder.iterdir()], str(folder))
    for path in dict.fromkeys([*shards, *find_shards(folder)]):
        check_file(path, None)
        check_header(path)


def adapter_refusal(where: str) -> RefusedError:
    """The error for a folder, or a repository of the hub, with adapter_config.json."""
    return RefusedError(
        "the folder holds an adapter, not a model",
        where=where,
        found="adapter_config.json",
        expected="the model that the adapter was made for",
    )


def no_weights_refusal(names: Iterable[str], where: str) -> RefusedError:
    """The error for a folder, or a repository of the hub, with these files and no safetensors among them."""
    pickles = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in PICKLES))
    return RefusedError(
        "the model folder has no safetensors weights",
        where=where,
        found=f"{', '.join(pickles[:3])} (pickle files can run code and are never opened)" if pickles else None,
        expected="*.safetensors",
        hint="convert the weights with safetensors' own conversion tool in a safe place" if pickles else None,
    )


def check_small_files(folder: Path) -> None:
    """Refuse configurations and tokenizers that are too large, lead out of the folder, or ask for code."""
    for path in sorted(_small_files(folder)):
        is_config = path.name in CONFIGS or path.suffix == ".jinja"
        limit = MAX_CONFIG_BYTES if is_config else MAX_TOKENIZER_BYTES
        check_file(path, MAX_INDEX_BYTES if path.name == INDEX_NAME else limit)
    values = {}
    for name in CONFIGS:
        if (folder / name).exists():
            values[name] = read_json(folder / name)
            _check_config(folder / name, values[name])
    if "config.json" in values:
        where, own = str(folder / "config.json"), values["config.json"].get("transformers_weights")
        check_sizes(values["config.json"], where)
        if own not in (None, SINGLE_NAME):
            raise RefusedError(
                "the configuration names its own file of weights, which is not read",
                where=where,
                found=f"transformers_weights: {str(own)[:80]!r}",
                expected=f"no such line: the weights in {SINGLE_NAME}, or in the files of {INDEX_NAME}",
                hint=f"call the file {SINGLE_NAME}, in a copy of the folder without that line",
            )


def _small_files(folder: Path) -> Iterator[Path]:
    """Everything in a folder that a library may read beside weights; some choose files by their endings only."""
    templates = folder / TEMPLATES_FOLDER
    if os.path.lexists(templates) and not stays_inside(templates, folder):
        raise RefusedError(
            "a folder of the model is a link that leads outside the model folder",
            where=str(templates),
            found=os.path.realpath(templates),
            expected="a folder inside it",
        )
    for place in (folder, templates):
        if place.is_dir():
            yield from (path for path in place.iterdir() if path.suffix.lower() in SMALL_SUFFIXES)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as plain data, with what ModelOpt says beside it of how the weights are quantised.

    Raises:
        RefusedError: missing, not JSON, or too large.
    """
    return read_with_modelopt(folder / "config.json", _read_checked)


def _read_checked(path: Path) -> dict[str, Any]:
    if path.exists():
        check_file(path, MAX_CONFIG_BYTES)
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a file that is missing or is none is refused."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"{path.name} cannot be read", where=str(path), found=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise RefusedError(f"{path.name} is not a JSON object", where=str(path), found=type(value).__name__)
    return value


def _missing(path: Path) -> RefusedError:
    return RefusedError(f"the model folder has no {path.name}", where=str(path.parent))


def check_file(path: Path, max_bytes: int | None) -> None:
    """Refuse links that lead out of the folder, what is no regular file, and what is too large."""
    if not stays_inside(path, path.parent):
        raise RefusedError(
            "a file of the model is a link that leads outside the model folder",
            where=str(path),
            found=str(Path(os.path.realpath(path))),
            expected="a file of the folder itself",
        )
    try:
        status = path.stat()
    except OSError as error:
        raise RefusedError("a file of the model cannot be read", where=str(path), found=str(error.strerror)) from error
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError(
            "a file of the model is no regular file",
            where=str(path),
            found=kind_of_file(status.st_mode),
            expected="a regular file",
        )
    if max_bytes is not None and status.st_size > max_bytes:
        raise RefusedError(
            f"{path.name} is too large",
            where=str(path),
            found=format_bytes(status.st_size),
            expected=f"at most {format_bytes(max_bytes)}",
        )


# --- configurations -------------------------------------------------------------------------------------------------


def _check_config(path: Path, config: dict[str, Any]) -> None:
    where = str(path)
    for place, key, value in _entries(config, ""):
        if key == "auto_map" and value:
            what = "the model needs code from its repository, which is never run"
            expected = "a model type that the installed transformers knows"
            raise RefusedError(what, where=where, found=place, expected=expected)
        if key in ("trust_remote_code", "use_kernels", "custom_generate", "kernel_config") and value:
            raise RefusedError(f"the model asks for code: {key}", where=where, found=place, expected=f"no {key}")
        if key.lstrip("_").startswith(("attn_implementation", "experts_implementation")):
            for name in value.values() if isinstance(value, dict) else [value]:
                if name is not None and name not in ATTENTIONS:
                    expected = f"one of {', '.join(ATTENTIONS)}"
                    text = "the model asks for a kernel from elsewhere, which is never loaded"
                    raise RefusedError(text, where=where, found=f"{place}: {str(name)[:80]!r}", expected=expected)


def _entries(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """(dotted place, key, value) at every depth; a loop, since depth is the file's choice."""
    rest = [(place, value)]
    while rest:
        place, value = rest.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                inner = f"{place}.{key}" if place else key
                yield inner, key, item
                rest.append((inner, item))
        elif isinstance(value, list):
            rest.extend((f"{place}[{index}]", item) for index, item in enumerate(value))


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, as transformers chooses them: `model.safetensors` if there is one, else
    those of the index. Without either, all of them.

    Raises:
        RefusedError: an index that is not readable or names something outside the folder.
    """
    single = folder / SINGLE_NAME
    if single.exists() or not (folder / INDEX_NAME).exists():
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    shards = indexed_shards(folder)
    for shard in shards:
        if not stays_inside(folder / shard, folder):
            raise _outside(folder / INDEX_NAME, shard)
        if not (folder / shard).is_file():
            raise missing_shard(shard, str(folder))
    return [folder / shard for shard in shards]


def indexed_shards(folder: Path) -> list[str]:
    """Names of the files that the index of a model folder has, whether they are there or not.

    Raises:
        RefusedError: an index that is not readable or names something outside the folder.
    """
    index = folder / INDEX_NAME
    check_file(index, MAX_INDEX_BYTES)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(shard) for shard in weight_map.values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        found = str(error)[:200]
        raise RefusedError("the index of the weights cannot be read", where=str(index), found=found) from error
    for shard in shards:
        if not SHARD_NAME.match(shard):
            raise _outside(index, shard)
    return shards


def unread_shards(folder: Path) -> list[str]:
    """Names of the files of weights that the index has and that are not read, since there is `model.safetensors`."""
    if not ((folder / SINGLE_NAME).exists() and (folder / INDEX_NAME).exists()):
        return []
    try:
        return [name for name in indexed_shards(folder) if name != SINGLE_NAME]
    except RefusedError:  # nobody reads this index
        return []


def missing_shard(name: str, where: str) -> RefusedError:
    """The error for an index that names a file which is not there."""
    return RefusedError("a file of the weights is missing", where=where, found=f"no {name}")


def _outside(index: Path, shard: str) -> RefusedError:
    return RefusedError(
        "the index names a file outside the model folder",
        where=str(index),
        found=repr(shard)[:200],
        expected="a plain file name that ends in .safetensors",
    )


# --- safetensors ----------------------------------------------------------------------------------------------------


def check_header(path: Path) -> None:
    """Refuse a safetensors file that is not what its header says, to the byte, as its library finds on opening it."""
    try:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
        if MAX_HEADER_BYTES < length < path.stat().st_size:
            raise _damaged(path, f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES} bytes")
        with safe_open(str(path), framework="numpy") as file:
            count = len(file.keys())
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)[:200], "a whole safetensors file") from error
    if count > MAX_TENSORS:
        raise _damaged(path, f"{count} tensors", f"at most {MAX_TENSORS}")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a safetensors file, by its header."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    """Type as in the header, such as `BF16`."""
    begin: int
    """First byte, counted from the start of the file."""
    num_bytes: int


def file_tensors(paths: Iterable[Path]) -> dict[str, FileTensor]:
    """Name -> tensor of safetensors files that were checked. The library does not say where a tensor's bytes are."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        for key, entry in entries.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                shape, dtype = tuple(entry["shape"]), entry["dtype"]
                found[key] = FileTensor(path, key, shape, dtype, 8 + length + begin, end - begin)
    return found


def are_equal(first: FileTensor, second: FileTensor) -> bool:
    """Whether two tensors are one table written twice: of one type and shape, to the byte."""
    if (first.shape, first.dtype, first.num_bytes) != (second.shape, second.dtype, second.num_bytes):
        return False
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.begin)
        other.seek(second.begin)
        left = first.num_bytes
        while left > 0:
            count = min(left, COMPARED_BYTES)
            if one.read(count) != other.read(count):
                return False
            left -= count
    return True


def _damaged(path: Path, found: str, expected: str) -> RefusedError:
    return RefusedError("a file of the weights cannot be read", where=str(path), found=found, expected=expected)


# Calls of other libraries with untrusted files or figures: any error that they raise becomes one refusal.

RUST_PANIC = "PanicException"
"""Name of the error that Rust libraries raise; it is no Exception, and no library exports it."""
OUT_OF_MEMORY = "DefaultCPUAllocator"
"""Text in torch's RuntimeError when the host has no memory left."""


@contextmanager
def refusing(what: str, where: str, hint: str | None = None) -> Iterator[None]:
    """Turn any error of a library into a refusal with this text. Odd values raise what nobody can list: KeyError and
    ZeroDivisionError, AttributeError, torch's RuntimeError. MemoryError is passed on, as are our own errors.
    """
    try:
        yield
    except BaseException as error:
        is_known = isinstance(error, (RoundpipeError, MemoryError)) or OUT_OF_MEMORY in str(error)
        if is_known or not (isinstance(error, Exception) or type(error).__name__ == RUST_PANIC):
            raise
        text = next((line for line in str(error).splitlines() if line.strip()), "")[:300]
        raise RefusedError(what, where=where, found=f"{type(error).__name__}: {text}", hint=hint) from error
