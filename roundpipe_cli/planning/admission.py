"""Whether `finetune` would take a recipe's model, as far as its configuration, files and the recipe decide. No torch.

Whether the split, packed rows or chunks keep a model's numbers, `finetune` proves on the model itself.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.costs.models import COUNTED_TYPES, Architecture
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.quantization import check_stored_in_4bit, describe_repacking, stored_form
from roundpipe_cli.model.files.supported import chunk_refusal, packing_refusal, scaled_by_length
from roundpipe_cli.model.files.untrusted import PICKLES, check_model_folder, find_shards
from roundpipe_cli.packages import FAST_KERNELS
from roundpipe_cli.recipe.check import chunk_clashes
from roundpipe_cli.recipe.schema import Recipe

_STATEFUL_KIND = re.compile(r"mamba|compress|conv|linear|recurrent|ssm|rwkv|lightning|delta|retention|lstm|hybrid")
"""Names of recurrent and convolution blocks in a configuration's list of kinds."""


def check_model(found: FoundConfig, recipe: Recipe) -> None:
    """Refuse a model that `finetune` would refuse, with the same message.

    Raises:
        RefusedError: as there.
    """
    if found.folder is not None:
        check_model_folder(found.folder, weights=holds_weights(found))
    check_configuration(found, recipe)


def check_configuration(found: FoundConfig, recipe: Recipe) -> None:
    """The part of `check_model` that reads no file.

    Raises:
        RefusedError: as there.
    """
    where = found.source if found.folder is None else str(found.folder / "config.json")
    if found.is_config and stored_form(found.config, where) == "bitsandbytes":
        check_stored_in_4bit(found.name, method=recipe.method, packed_as=recipe.packed_as, unpacks=recipe.load_in_16bit)
    check_rows(
        found.config, packing=recipe.packs, chunks=recipe.pipeline.num_chunks > 1, max_seq_length=recipe.row_tokens
    )


def check_shareable(recipe: Recipe, machines: int) -> None:
    """Refuse what several machines cannot train together.

    Raises:
        RefusedError: a key of the recipe, or too few microbatches in a step.
    """
    alone = (
        ("objective", recipe.objective, Recipe.objective),
        ("on_oom", recipe.on_oom, "stop"),
        ("load_best_model_at_end", recipe.load_best_model_at_end, False),
    )
    for key, value, only in alone if machines > 1 else ():
        if value != only:
            found, expected = str(value).lower(), str(only).lower()
            raise RefusedError(f"{key}: not with several machines", found=found, expected=expected)
    if recipe.microbatches_per_step < machines:
        raise RefusedError(
            "gradient_accumulation_steps: fewer microbatches in a step than machines",
            found=f"{recipe.microbatches_per_step} microbatches, {machines} machines",
            expected="at least one for each; several for each of its devices",
        )


def check_rows(config: Mapping[str, Any], *, packing: bool, chunks: bool, max_seq_length: int) -> None:
    """Refuse rows that a configuration's own words rule out; everything else about them is proven by `finetune`.

    Args:
        packing, chunks: whether the recipe asks for packed rows, and for sequences in chunks.

    Raises:
        RefusedError: blocks that carry state from token to token, or positions that depend on the longest row.
    """
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    stateful, scaled = _stateful_block(config), _scaled_positions(config, max_seq_length)
    if _GATED_DELTA.fullmatch(str(config.get("model_type"))):
        stateful = None
    why = stateful or (None if scaled is None else ("model.rotary_emb", scaled))
    if why and packing:
        raise packing_refusal(*why)
    if why and chunks:
        expected = () if stateful else ("positions that do not depend on the length of the sequence",)
        raise chunk_refusal(*why, *expected)


_GATED_DELTA = re.compile("qwen3_next|qwen3_5(_moe)?(_text)?|olmo_hybrid")
"""Types whose recurrent blocks begin anew at each packed row, and pass their state from chunk to chunk."""


def _stateful_block(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(where, what) of the first block whose kind is a recurrent or convolution block's, in a list of kinds."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    for index, kind in enumerate(kinds if isinstance(kinds, list) else ()):
        if _STATEFUL_KIND.search(str(kind)):
            return f"block.{index}", f"a block of the kind {kind}, which carries state from token to token"
    return None


def _scaled_positions(config: Mapping[str, Any], max_seq_length: int) -> str | None:
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return None
    parts = [scaling, *(part for part in scaling.values() if isinstance(part, dict))]
    kinds = {str(part[key]) for part in parts for key in ("rope_type", "type") if part.get(key)}
    limit = config.get("max_position_embeddings")
    return scaled_by_length(kinds, limit if isinstance(limit, int) else None, max_seq_length)


def packing_obstacle(found: FoundConfig, recipe: Recipe) -> str | None:
    """Why `packing: auto` cannot pack this model's rows, as far as its configuration says; None where it can."""
    return recipe.unpackable or rows_obstacle(found.config, recipe.row_tokens)


def rows_obstacle(config: Mapping[str, Any], max_seq_length: int, *, in_chunks: bool = False) -> str | None:
    """Why rows cannot be packed, or come in chunks, by the configuration's own words; None where they say nothing."""
    try:
        check_rows(config, packing=not in_chunks, chunks=in_chunks, max_seq_length=max_seq_length)
    except RefusedError as error:
        return error.in_short
    return None


def chunk_obstacle(config: Mapping[str, Any], recipe: Recipe) -> str | None:
    """Why this model's rows cannot come in chunks, as far as recipe and configuration say; None where they can."""
    clashes = "; ".join(f"{key}: {why}" for key, why in chunk_clashes(recipe))
    return clashes or rows_obstacle(config, recipe.row_tokens, in_chunks=True)


def unproven(architecture: Architecture, recipe: Recipe) -> list[str]:
    """Lines on what only `finetune` finds out about the model, and what only another machine can do."""
    lines = []
    if _GATED_DELTA.fullmatch(architecture.model_type):
        lines.append(
            "assumed: recurrent blocks take the time and memory of attention with as many weights, not measured; for "
            f"that GPUs need {' and '.join(FAST_KERNELS.values())}: plain PyTorch moves over ten times the bytes"
        )
    elif architecture.model_type not in COUNTED_TYPES:
        lines.append(
            f"not known: whether `finetune` takes models of the type {architecture.model_type}; it proves the model on "
            "its configuration before weights are fetched or read, and refuses it where its numbers would change"
        )
    stored, packed_as = architecture.stored_as, recipe.packed_from(architecture.stored_as)
    if stored is not None and packed_as not in (None, stored):
        lines.append(f"note: {describe_repacking(stored, packed_as)}")
    needs_it = recipe.packed_as is not None and PACKED_FORMATS[recipe.packed_as].needs_bitsandbytes
    if needs_it and importlib.util.find_spec("bitsandbytes") is None:
        lines.append("note: weights in 4 or 8 bit need the package bitsandbytes, which is not installed here")
    return lines


def has_weights(folder: Path) -> bool:
    """Whether there are weights in the folder, refused kinds included."""
    return any(next(folder.glob(pattern), None) is not None for pattern in ("*.safetensors", *PICKLES))


def holds_weights(found: FoundConfig) -> bool:
    """Whether weights are in the model's folder; in the hub's cache, where downloads may be unfinished, all of them."""
    if found.folder is None:
        return False
    if found.is_local:
        return has_weights(found.folder)
    try:
        return bool(find_shards(found.folder))
    except RefusedError:
        return False
