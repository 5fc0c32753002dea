"""Number of parameters of a model, by `plan`'s own count, by the model itself or by its files. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import check_sizes
from roundpipe_cli.costs.find_model import FoundConfig, built_architecture
from roundpipe_cli.costs.models import MAX_COUNT_ERROR, Architecture, is_counted_exactly, with_stored_count
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.quantization import quantization_settings
from roundpipe_cli.model.untrusted import INDEX_NAME, are_equal, find_shards, read_json, tensor_places
from roundpipe_cli.planning.admission import has_weights, holds_weights
from roundpipe_cli.units import format_count

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLAG = "tie_word_embeddings"
HEAD = re.compile(r"(?<!mtp\.)\b(lm_head|embed_out|output_projection|lm_loss)\.(?!.*bias$)")
EMBEDDING = re.compile(
    r"\b(embed_tokens|tokens_embed|embed_in|word_embeddings?|tok_embeddings|wte|embeddings)\.weight$"
)
"""Names that the LM head and the embedding have in the files of language models."""

Build = Callable[[FoundConfig], Mapping[str, Any] | None]
"""Counts a model by building it without weights (`model/meta_counts.py`); None: it could not be built."""


def counted_architecture(found: FoundConfig, build: Build | None = None) -> Architecture:
    """The model's architecture, with as many parameters as the model has, or as its files hold.

    Args:
        build: for a configuration that is not counted exactly here.

    Raises:
        RefusedError: a needed figure is missing or impossible, or `build` refuses the model.
    """
    if build is not None and found.is_config and not is_counted_exactly(found.config):
        check_sizes(found.config, f"{found.name} ({found.source})")
        counts = build(found)
        if counts is not None:
            return _as_built(found, counts)
    architecture = found.architecture()
    if architecture.tied and _has_own_head(found):
        architecture = replace(architecture, tied=False)
    in_header = found.config.get("stored_parameters")
    if isinstance(in_header, int):
        return with_stored_count(architecture, in_header, found.source)
    count, source = _stored_count(found, architecture.tied)
    return _noting_no_weights(found, with_stored_count(architecture, count, source))


def _says_tied(config: Mapping[str, Any]) -> bool:
    """Whether a configuration itself says whether the LM head is the embedding."""
    text = config.get("text_config")
    return FLAG in config or (isinstance(text, dict) and FLAG in text)


def _lists_weights(found: FoundConfig) -> bool:
    """Whether the names of the model's weights are known."""
    return found.folder is not None and (holds_weights(found) or (found.folder / INDEX_NAME).is_file())


def _has_own_head(found: FoundConfig) -> bool:
    """Whether the files hold an LM head beside the embedding, with other values as far as they are here.

    `finetune` then uses both, whatever the configuration says (`model/stored/tables.py`).
    """
    if found.folder is None:
        return False
    if not holds_weights(found):
        try:
            names = read_json(found.folder / INDEX_NAME)["weight_map"]
        except (RefusedError, KeyError):
            return False
        return all(any(pattern.search(str(name)) for name in names) for pattern in (HEAD, EMBEDDING))
    places = {name: place for path in find_shards(found.folder) for name, place in tensor_places(path).items()}
    heads, tables = ([places[name] for name in places if pattern.search(name)] for pattern in (HEAD, EMBEDDING))
    return bool(heads and tables) and not any(are_equal(head, table) for head in heads for table in tables)


def _as_built(found: FoundConfig, counts: Mapping[str, Any]) -> Architecture:
    """The model's own count; a notice says so where the files hold another number."""
    how = f"{found.source}; parameters counted on the model itself, built without weights"
    if counts["shared"] and _has_own_head(found):
        counts = {**counts, "parameters": counts["parameters"] + counts["shared"], "shared": 0}
    architecture = built_architecture(counts, name=found.name, source=how)
    if counts["shared"] and not _says_tied(found.config) and not _lists_weights(found):
        note = (
            f"note: the LM head is counted as the embedding, as transformers takes it where config.json says nothing; "
            f"one that the files hold beside it adds {format_count(counts['shared'])} parameters"
        )
        architecture = replace(architecture, notes=(note,))
    count, source = _stored_count(found, architecture.tied)
    if count is not None and abs(architecture.parameters / count - 1) > MAX_COUNT_ERROR:
        held, own = format_count(count), format_count(architecture.parameters)
        note = f"note: {held} parameters by {source}, {own} in the model that transformers builds, which is planned for"
        architecture = replace(architecture, notes=(*architecture.notes, note))
    return _noting_no_weights(found, architecture)


def _noting_no_weights(found: FoundConfig, architecture: Architecture) -> Architecture:
    if not found.is_local or found.folder is None or quantization_settings(found.config) or has_weights(found.folder):
        return architecture
    note = f"note: {found.folder} holds no weights; `finetune` needs *.safetensors there"
    return replace(architecture, notes=(*architecture.notes, note))


def _stored_count(found: FoundConfig, tied: bool) -> tuple[int | None, str]:
    """Parameters in the model's files, or None, and the name of the source."""
    if found.folder is None or quantization_settings(found.config):
        return None, ""
    if holds_weights(found):
        places = [(n, place) for path in find_shards(found.folder) for n, place in tensor_places(path).items()]
        # some files hold a shared matrix under both names
        count = sum(math.prod(place.shape) for name, place in places if not (tied and HEAD.search(name)))
        if not count:
            raise RefusedError(
                "the model's files hold no weights",
                where=str(found.folder),
                found="0 numbers in their headers",
                expected="the weights of the model in *.safetensors",
                hint="they may have been cut off: fetch or copy the model again",
            )
        return count, "the headers of its weights"
    return _count_of_index(found.folder, found.config), INDEX_NAME


def _count_of_index(folder: Path, config: dict[str, Any]) -> int | None:
    """Parameters by the index of weights that are not here; None where it has no total."""
    try:
        metadata = read_json(folder / INDEX_NAME).get("metadata")
    except RefusedError:
        return None
    figures = metadata if isinstance(metadata, dict) else {}
    count, size = figures.get("total_parameters"), figures.get("total_size")
    dtype_bytes = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")))
    if isinstance(count, int) and count > 0:
        return count
    return round(size / dtype_bytes) if isinstance(size, (int, float)) and size > 0 and dtype_bytes else None
