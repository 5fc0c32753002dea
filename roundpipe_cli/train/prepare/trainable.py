"""The trained part of a model: adapters, new ones or those of a folder, or its own parameters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import sha256_of
from roundpipe_cli.model.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, trained_tokens
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.lora import ADAPTER, LoraSettings, add_lora, continue_lora, refuse_adapters_outside_blocks
from roundpipe_cli.model.new_tokens import NewTokens, table_names
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import LoraConfig, Recipe
from roundpipe_cli.regular_files import tried_paths
from roundpipe_cli.units import format_count


def make_trainable(
    model: nn.Module,
    split: ModelSplit,
    recipe: Recipe,
    source: ModelSource,
    *,
    new: NewTokens,
    dtype: torch.dtype,
    start: Path | None,
) -> Any:
    """Put adapters into a model, or mark which of its parameters are trained.

    Args:
        dtype: of adapters' weights while training.
        start: folder of an adapter to train further.

    Returns:
        PEFT's model around it; None for full fine-tuning.
    """
    noisy: Any = model.get_input_embeddings()  # type: ignore[operator]
    setattr(noisy, NOISE_ATTRIBUTE, recipe.neftune_noise_alpha)
    if recipe.method == "full":
        _train_all_but(model, recipe.frozen_parameters, split.unreached)
        _refuse_frozen_rows(model, recipe, new)
        return None
    name = source.name if source.commit is not None else str(source.folder)  # PEFT finds it from any folder
    if start is not None:
        peft_model = continue_lora(model, start, dropout=recipe.lora.dropout, dtype=dtype, base_name=name)
        refuse_other_shape(recipe.lora, peft_model.peft_config[ADAPTER], start)
        _refuse_other_tokens(peft_model.peft_config[ADAPTER], recipe, new, start)
    else:
        expert_r = None if recipe.lora.expert_r == "auto" else recipe.lora.expert_r
        settings = LoraSettings(**same_named(LoraSettings, recipe.lora) | {"expert_r": expert_r, "new_ids": new.ids})
        peft_model = add_lora(model, settings, dtype=dtype, base_name=name, blocks_path=split.blocks_path)
    peft_model.peft_config[ADAPTER].revision = source.commit
    refuse_adapters_outside_blocks(model, split.blocks_path)
    return peft_model


def same_named(kind: type[Any], source: object) -> dict[str, Any]:
    """Values for those fields of a dataclass that `source` has attributes of the same names for."""
    return {one.name: getattr(source, one.name) for one in fields(kind) if hasattr(source, one.name)}


def describe_unreached(model: nn.Module, split: ModelSplit) -> str | None:
    """A notice about weights that text never uses; None: there are none."""
    parts = {name: parameter.numel() for name, parameter in model.named_parameters() if name in split.unreached}
    if not parts:
        return None
    modules = sorted({".".join(name.split(".")[:2]) for name in parts})
    return (
        f"text only: {format_count(sum(parts.values()))} parameters that text does not reach stay as they are "
        f"({', '.join(modules[:4])})"
    )


def _train_all_but(model: nn.Module, patterns: Sequence[str], unreached: Collection[str]) -> None:
    """Train every parameter that text uses and whose name matches none of the patterns, each of which has a match."""
    frozen = set(unreached)
    for pattern in patterns:
        try:
            found = {name for name, _ in model.named_parameters() if re.search(pattern, name)}
        except re.error as error:
            raise RefusedError(
                "not a regular expression", where="frozen_parameters", found=f"{pattern}: {error}"
            ) from error
        if not found:
            example = next(name for name, _ in model.named_parameters())
            raise RefusedError(
                "no parameter has such a name",
                where="frozen_parameters",
                found=pattern,
                expected=f"names like {example}",
            )
        frozen |= found
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if all(not parameter.requires_grad for parameter in model.parameters()):
        raise RefusedError("nothing is left to train", where="frozen_parameters", found=", ".join(patterns))


def _refuse_frozen_rows(model: nn.Module, recipe: Recipe, new: NewTokens) -> None:
    frozen = sorted(name for name in table_names(model) if not model.get_parameter(name).requires_grad)
    if new.ids and frozen:
        raise RefusedError(
            "the rows of new tokens would never be trained",
            where="add_tokens",
            found=f"frozen_parameters: {', '.join(recipe.frozen_parameters)}, which leaves out {', '.join(frozen)}",
            hint="train these tables too, or delete add_tokens",
        )


def _refuse_other_tokens(adapter: Any, recipe: Recipe, new: NewTokens, folder: Path) -> None:
    """Raise a RefusedError where an adapter to train further has rows of other new tokens than the recipe adds."""
    whole = bool(adapter.modules_to_save) and not adapter.trainable_token_indices
    theirs = [number for number in trained_tokens(adapter.trainable_token_indices) if number >= new.first]
    if theirs != sorted(new.ids) and not whole:
        raise RefusedError(
            "the adapter to start from was trained with other new tokens",
            where="add_tokens",
            found=f"{len(new.ids)} tokens: {', '.join(recipe.add_tokens) or 'none'}",
            expected=f"{len(theirs)} tokens, as in {folder}",
            hint="write the add_tokens of the recipe that the adapter was trained by",
        )


def start_folder(loaded: LoadedRecipe) -> Path | None:
    """Folder of the adapter to train further.

    Raises:
        RefusedError: it is named and not there.
    """
    named = loaded.recipe.lora.start_from
    if named is None or loaded.recipe.method == "full":
        return None
    folder = resolve_path(named, loaded.folder)
    if folder is None or not (folder / ADAPTER_WEIGHTS).is_file():
        tried = ", ".join(str(path / ADAPTER_WEIGHTS) for path in tried_paths(named, loaded.folder))
        raise RefusedError("no adapter there", where="lora.start_from", found=named, expected=f"one of {tried}")
    return folder


def start_hash(start: Path | None, recipe: Recipe) -> str:
    """SHA-256 over the files of an adapter that is trained further and that a resumed run reads again: its
    configuration, and the weights where they are DPO's reference. Empty without one.

    Raises:
        RefusedError: one cannot be read.
    """
    if start is None:
        return ""
    names = (ADAPTER_CONFIG, *([ADAPTER_WEIGHTS] if recipe.objective_kind.needs_reference else []))
    try:
        return hashlib.sha256("".join(sha256_of(start / name) for name in names).encode()).hexdigest()
    except OSError as error:
        raise RefusedError("the adapter cannot be read", where=str(start), found=error.strerror) from error


def describe_reference(recipe: Recipe, source: ModelSource, start: Path | None) -> str | None:
    """A notice about DPO's reference model; None: the objective has none."""
    if not recipe.objective_kind.needs_reference:
        return None
    whose = f"reference model of {recipe.objective}: {source.name}"
    if start is None:
        return f"{whose}, without the adapter that is trained"
    return f"{whose} with the adapter {start} as it is, which is trained further"


def refuse_other_shape(lora: LoraConfig, adapter: Any, folder: Path) -> None:
    """Raise a RefusedError where a key of the recipe says something else than the adapter that is trained further; a
    key that stands at its default says nothing."""
    targets = adapter.target_modules
    theirs = {
        "r": adapter.r,
        "alpha": float(adapter.lora_alpha),
        "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets)),
        "modules_to_save": tuple(sorted(adapter.modules_to_save or ())),
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
    }
    for key, value in theirs.items():
        asked = getattr(lora, key)
        asked = tuple(sorted(asked)) if isinstance(asked, tuple) else asked
        if asked not in (value, getattr(LoraConfig(), key)):
            raise RefusedError(
                "the adapter to start from has another shape",
                where=f"lora.{key}",
                found=str(asked),
                expected=f"{value}, as in {folder}",
                hint="delete the line",
            )
