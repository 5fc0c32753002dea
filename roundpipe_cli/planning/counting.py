"""How many parameters a model has: what its files say, where they are here, before what `plan` counts. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.costs.models import Architecture, with_stored_count
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.quantization import quantization_settings
from roundpipe_cli.model.untrusted import INDEX_NAME, find_shards, num_elements, read_json
from roundpipe_cli.planning.admission import has_weights

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def counted(found: FoundConfig) -> Architecture:
    """The model's architecture, with as many parameters as its files hold.

    Raises:
        RefusedError: a needed figure is missing or impossible.
    """
    architecture = found.architecture()
    in_header = found.config.get("stored_parameters")
    if isinstance(in_header, int):
        return with_stored_count(architecture, in_header, found.source)
    if found.folder is None or quantization_settings(found.config):
        return with_stored_count(architecture)
    if has_weights(found.folder):
        twice = "lm_head.weight" if architecture.tied else None  # some files hold a shared matrix under both names
        count = sum(num_elements(path, without=twice) for path in find_shards(found.folder))
        return with_stored_count(architecture, count, "the headers of its weights")
    architecture = with_stored_count(architecture, _count_of_index(found.folder, found.config), INDEX_NAME)
    if not found.is_local:
        return architecture
    note = f"note: {found.folder} holds no weights; `finetune` needs *.safetensors there"
    return replace(architecture, notes=(*architecture.notes, note))


def _count_of_index(folder: Path, config: dict[str, Any]) -> int | None:
    """By the index of weights that are not here; None where it does not tell."""
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
