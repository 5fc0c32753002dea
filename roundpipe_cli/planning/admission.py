"""Whether `finetune` would take a recipe's model, as far as its configuration, files and the recipe decide. No torch.

`finetune` asks the same functions while it loads; `plan` and `bench` ask them all before they answer.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.find_model import FoundConfig
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.architectures import check_architecture, dropout_refusal
from roundpipe_cli.model.quantization import check_stored_in_4bit, is_stored_in_4bit
from roundpipe_cli.model.type_refusals import FUSED_EXPERTS, PROVEN, check_type
from roundpipe_cli.model.untrusted import PICKLES, check_model_folder, find_shards
from roundpipe_cli.recipe.schema import Recipe


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
    if found.is_config:
        check_architecture(found.config, name=found.name, where=where)
        if is_stored_in_4bit(found.config, where):
            check_stored_in_4bit(found.name, method=recipe.method, packed_as=recipe.packed_as)
    check_type(
        found.config,
        packing=recipe.packs,
        chunks=recipe.pipeline.num_chunks > 1,
        max_seq_length=recipe.max_seq_length,
    )


def check_adapters(architecture: Architecture, recipe: Recipe) -> None:
    """Refuse adapters that `finetune` would refuse.

    Raises:
        RefusedError: as there.
    """
    lora, has_experts = recipe.lora, any(block.num_experts for block in architecture.blocks)
    adapts_all = recipe.method == "lora" and lora.target_modules == "all-linear" and lora.start_from is None
    if lora.dropout and adapts_all and has_experts and architecture.model_type in FUSED_EXPERTS:
        raise dropout_refusal(lora.dropout)


def packing_obstacle(found: FoundConfig, recipe: Recipe) -> str | None:
    """Why `packing: auto` cannot pack this model's rows, as far as its configuration says; None where it can."""
    if recipe.unpackable is not None:
        return recipe.unpackable
    try:
        check_type(found.config, packing=True, chunks=False, max_seq_length=recipe.max_seq_length)
    except RefusedError as error:
        return error.in_short
    return None


def packing_note(found: FoundConfig, recipe: Recipe) -> str:
    """The meaning of `packing: auto` for a plan, which has not read the rows; empty where the recipe says yes or no."""
    if recipe.packing != "auto":
        return ""
    obstacle = packing_obstacle(found, recipe)
    if obstacle is None:
        return "packing (auto): short rows will be packed, so sequences are counted as full"
    return f"packing (auto): off: {obstacle}; rows shorter than max_seq_length train fewer tokens a second than this"


def unproven(architecture: Architecture, recipe: Recipe) -> list[str]:
    """Lines on what only `finetune` finds out about the model, and what only another machine can do."""
    lines = []
    if architecture.model_type not in PROVEN:
        lines.append(
            f"not known: whether `finetune` takes models of the type {architecture.model_type}; it tries the model "
            "itself before it trains, and refuses it where the split would change its numbers"
        )
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
