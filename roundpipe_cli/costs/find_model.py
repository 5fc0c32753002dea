"""Finds a model's figures: in a local folder, a GGUF file, the shipped figures, or config.json of the hub.

Weights are never read or downloaded, and neither torch nor transformers is imported.
"""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from roundpipe_cli.costs.exact_counts import is_counted_exactly
from roundpipe_cli.costs.models import Architecture, Block, noting_all_experts, parse_config, read_with_modelopt
from roundpipe_cli.errors import RefusedError, closest, num_edits
from roundpipe_cli.hub.ask import TIMEOUT, Repository, UnreachableError, ask_hub, is_offline, library_messages, notice
from roundpipe_cli.packages import CARRIERS, missing_package
from roundpipe_cli.regular_files import open_regular, read_regular
from roundpipe_cli.watchdog import at_work

# The metadata at the head of a GGUF file, read without any library and without its tensors.
#
# Format: magic `GGUF`, version (u32), number of tensors and of metadata pairs (u64 each), then pairs of key, type and
# value, all little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Arrays are skipped, only their
# length is kept. Nothing goes beyond the file's end, so a damaged file cannot take memory or time.

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_PAIRS = 10_000
_MAX_TEXTS = 1 << 22
"""Largest length of one array; the largest vocabularies have 2^18 tokens, and a few times as many merges."""
_MAX_ELEMENTS = 1 << 48
_MAX_KEPT_STRING_BYTES = 1 << 16
"""A longer text, such as a chat template, is cut off here."""


def read_gguf_config(path: Path) -> dict[str, Any]:
    """A GGUF file's figures under the names of a Hugging Face config.json.

    Raises:
        RefusedError: the file cannot be read, is damaged, or is not a GGUF file.
    """
    try:
        with open_regular(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata = _Header(data).metadata()
    except OSError as error:
        raise RefusedError(f"the model file cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise RefusedError(
            f"the model file is not a readable GGUF file: {error}",
            where=str(path),
            expected="a complete .gguf file of version 2 or 3",
        ) from None
    return _as_config(metadata)


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 0

    def metadata(self) -> dict[str, Any]:
        """All pairs; an array's value is its length. Tied embeddings show as no tensor named `output.weight`."""
        if self._data[self._pass(4) : 4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_pairs = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in (2, 3) or num_pairs > _MAX_PAIRS or num_tensors > 10 * _MAX_PAIRS:
            raise ValueError(f"version {version} with {num_pairs} metadata pairs")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            pairs[key] = self._value(self._number("<I"))
        tensors = [self._tensor() for _ in range(num_tensors)]
        pairs["has_output_matrix"] = any(name == "output.weight" for name, _ in tensors)
        pairs["num_elements"] = sum(count for _, count in tensors)
        return pairs

    def _tensor(self) -> tuple[str, int]:
        """Name and number of elements."""
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > 8:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(dimensions)]
        self._pass(4 + 8)
        if math.prod(shape) > _MAX_ELEMENTS:
            raise ValueError(f"tensor {name} has {' x '.join(map(str, shape))[:80]} elements")
        return name, math.prod(shape)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        item, count = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            self._pass(count * struct.calcsize(_SCALARS[item]))
        elif item == _STRING and count <= _MAX_TEXTS:
            length_at, place, last = struct.Struct("<Q").unpack_from, self._place, len(self._data) - 8
            for _ in range(count):  # a vocabulary has 10^5
                place += 8 + length_at(self._data, place)[0] if place <= last else 8
            self._pass(place - self._place)
        else:
            raise ValueError(f"an array of {count} values of type {item}")
        return count

    def _string(self) -> str:
        length = self._number("<Q")
        start = self._pass(length)
        return self._data[start : start + min(length, _MAX_KEPT_STRING_BYTES)].decode("utf-8", errors="replace")

    def _number(self, form: str) -> Any:
        return struct.unpack_from(form, self._data, self._pass(struct.calcsize(form)))[0]

    def _pass(self, count: int) -> int:
        """Go on by so many bytes; returns where they begin."""
        start = self._place
        self._place += count
        if self._place > len(self._data):
            raise ValueError("it ends in the middle of its header")
        return start


def _as_config(metadata: dict[str, Any]) -> dict[str, Any]:
    model_type = str(metadata.get("general.architecture", "unknown"))
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "sliding_window": "attention.sliding_window",
        "max_position_embeddings": "context_length",
    }
    config: dict[str, Any] = {ours: metadata.get(f"{model_type}.{theirs}") for ours, theirs in names.items()}
    config["vocab_size"] = metadata.get("tokenizer.ggml.tokens") or metadata.get(f"{model_type}.vocab_size")
    config["stored_parameters"] = metadata["num_elements"] or None
    config["tie_word_embeddings"] = not metadata["has_output_matrix"]
    config["chat_template"] = metadata.get("tokenizer.chat_template")
    config["model_type"] = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "gemma3": "gemma3_text"}.get(
        model_type, model_type.replace("-", "_")
    )
    return {key: value for key, value in config.items() if value is not None}


# The figures of the shipped recipes' models (models.json), so that planning them needs no network.


@lru_cache(maxsize=1)
def shipped_figures() -> dict[str, dict[str, Any]]:
    """config.json figures of the models that the shipped recipes name, by hub id; `counted`, where `parse_config` does
    not count a type exactly, are what `meta_counts.py` counts of the built model."""
    text = files("roundpipe_cli.costs").joinpath("models.json").read_text(encoding="utf-8")
    return {re.sub(r" \(text\)$", "", name): figures for name, figures in json.loads(text).items()}


def figures_of(hub_id: str) -> tuple[dict[str, Any], str] | None:
    """A shipped model's figures and their source; a fine-tuned sibling (`-Instruct`, `-it`, ...) has the same."""
    by_family = {_family(name): name for name in shipped_figures()}
    name = by_family.get(_family(hub_id))
    if name is None:
        return None
    figures = shipped_figures()[name]
    note = "" if name == hub_id else f" (those of {name})"
    note += f": {figures['source']}" if "source" in figures else ""
    return figures, f"figures shipped with the tool{note}"


def shipped_architecture(hub_id: str) -> Architecture | None:
    """A shipped model's architecture."""
    found = _shipped(hub_id)
    return None if found is None else found.architecture()


def _family(hub_id: str) -> str:
    return re.sub(r"-(instruct|it|pt|base|chat|instruct-2507|thinking-2507)(?=-v[\d.]+$|-fp8$|$)", "", hub_id.lower())


# A model's architecture from counts of the model itself.

_COUNTS = ("parameters", "unreached", "boundary", "tail", "shared", "blocks")


def built_architecture(counts: Mapping[str, Any], *, name: str, source: str) -> Architecture:
    """The architecture of a model that was counted.

    Args:
        counts: the figures of a configuration under the names of `parse_config`; `parameters`, of the whole model;
            `unreached`, by text; `boundary`, values per token between two blocks; `tail`, of the head layer beside the
            LM head's matrix; `shared`, of this matrix with the embedding; `blocks`: (such blocks in a row, weights of
            attention's matrices, of all other matrices, of those that one token passes through, of all the rest, number
            of experts).

    Raises:
        RefusedError: a figure is missing or impossible.
    """
    figures = {key: value for key, value in counts.items() if key not in _COUNTS}
    figures["tie_word_embeddings"] = bool(counts["shared"])
    shape = parse_config(figures, name=name, source=source)
    rows = [row for count, *row in counts["blocks"] for _ in range(count)]
    blocks = tuple(Block(*(*row, one.window)) for row, one in zip(rows, shape.blocks, strict=True))
    found = noting_all_experts(replace(shape, blocks=blocks, tail_params=counts["tail"], is_guess=False))
    embed_params = found.embed_params + counts["parameters"] - found.parameters
    unreached, columns = counts["unreached"], counts["boundary"]
    return replace(found, embed_params=embed_params, unreached_params=unreached, boundary_columns=columns)


_MAX_CONFIG_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A model's configuration as plain data."""

    config: dict[str, Any]
    name: str
    """The model's name, as the recipe has it."""
    source: str
    """Source of the figures, as a text for the user."""
    folder: Path | None = None
    """With config.json; None for a GGUF file and for figures that ship with the tool."""
    is_local: bool = False
    """Whether the user named the folder; otherwise it is one of the hub's cache."""
    is_config: bool = True
    """A config.json's content, or what of it ships with the tool; not made of a GGUF file's header."""

    @at_work("reading the model's figures")
    def architecture(self) -> Architecture:
        """The architecture that it describes.

        Raises:
            RefusedError: a needed figure is missing or impossible.
        """
        if self.folder is None and "counted" in self.config:
            return built_architecture({**self.config, **self.config["counted"]}, name=self.name, source=self.source)
        return parse_config(self.config, name=self.name, source=self.source)

    @property
    def needs_building(self) -> bool:
        """Whether its parameters are counted exactly only on the model itself, built without weights."""
        return self.folder is not None and not is_counted_exactly(self.config)


def find_architecture(model: str, local: Path | None = None) -> Architecture:
    """The architecture of a model's newest revision; arguments and errors as of `find_config`."""
    return find_config(model, local).architecture()


def find_config(model: str, local: Path | None = None, revision: str | None = None) -> FoundConfig:
    """The configuration of a recipe's `model`; `local` is the existing file or folder that it names, if it does.

    Raises:
        RefusedError: no such model, its figures cannot be read, or the hub cannot be reached.
    """
    if model.startswith("package:"):
        return _packaged(model)
    if local is not None:
        return _local(model, local)
    if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")):
        raise RefusedError("there is no such model file or folder", where="model", found=model)
    shipped = _shipped(model) if revision is None else None
    return shipped or _from_hub(model, revision)


def _shipped(hub_id: str) -> FoundConfig | None:
    found = figures_of(hub_id)
    return None if found is None else FoundConfig(found[0], hub_id, found[1])


def _packaged(model: str) -> FoundConfig:
    name = model.removeprefix("package:")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise RefusedError("not the name of a Python package", where="model", found=model, expected="package:NAME")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        shipped = _shipped(CARRIERS[name]) if name in CARRIERS else None
        if shipped is not None:
            return shipped
        raise missing_package(name)
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise RefusedError(
            f"the package {name} should carry one .gguf file",
            where="model",
            found=", ".join(file.name for file in found) or "none",
        )
    return _local(model, found[0])


@at_work("reading the model's configuration")
def _local(model: str, path: Path) -> FoundConfig:
    if path.is_file():
        if path.suffix != ".gguf":
            raise RefusedError(
                "a model file is a .gguf file", where="model", found=str(path), hint="name the model's folder instead"
            )
        return FoundConfig(read_gguf_config(path), model, f"the header of {path.name}", is_config=False)
    config = path / "config.json"
    if not config.is_file():
        files = sorted(entry.name for entry in path.glob("*"))[:5]
        raise RefusedError(
            "the model folder has no config.json",
            where="model",
            found=f"{path}: {', '.join(files) or 'an empty folder'}",
            expected="a Hugging Face model folder",
        )
    return FoundConfig(_read_config(config), model, str(config), path, is_local=True)


def _read_config(path: Path) -> dict[str, Any]:
    return read_with_modelopt(path, _read_object)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        raise RefusedError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise RefusedError(f"{path.name} is not a JSON object", where=str(path), expected="a model's configuration")
    return config


def _from_hub(model: str, revision: str | None) -> FoundConfig:
    """config.json of a hub model, from the local cache or the hub; nothing else is downloaded."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise RefusedError("neither a file, a folder nor a hub id", where="model", found=model)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError as error:
        raise RefusedError("not a hub id", where="model", found=model, expected=str(error)) from None
    if isinstance(cached, str):
        where = "config.json in the hub's local cache"
        return FoundConfig(_read_config(Path(cached)), model, where, Path(cached).parent)
    if is_offline():
        raise _unreachable(model, "HF_HUB_OFFLINE is set")
    timeout: Any = TIMEOUT
    slips = [known for known in shipped_figures() if num_edits(model.lower(), known.lower()) <= 1]
    if slips and model not in slips:  # before the hub is asked, which takes long where it does not answer
        notice(f"asking the hub for {model}; did you mean {slips[0]}?")

    def question() -> str:
        return hf_hub_download(model, "config.json", revision=revision, etag_timeout=timeout)

    try:
        with library_messages(notice):
            path = ask_hub(Repository(model), question, notice)
    except UnreachableError as error:
        raise _unreachable(model, f"the hub cannot be reached ({error})") from None
    except RefusedError as error:
        (problem,) = error.problems
        if near := closest(model, list(shipped_figures())):
            error.problems = (replace(problem, hint=f"did you mean {near}? {problem.hint or ''}".strip()),)
        raise
    return FoundConfig(_read_config(Path(path)), model, "config.json of the hub", Path(path).parent)


def _unreachable(model: str, why: str) -> RefusedError:
    near = closest(model, list(shipped_figures()))
    return RefusedError(
        f"the figures of {model} cannot be fetched: {why}",
        where="model",
        found=model,
        expected="a local folder with config.json, or one of " + ", ".join(list(shipped_figures())[:6]) + ", ...",
        hint=(f"did you mean {near}? " if near else "")
        + "the models named here need no network: their figures come with roundpipe",
    )
