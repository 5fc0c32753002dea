"""Tables that a configuration ties while the files hold each of them: the LM head beside the embedding.

As in transformers' loader the files decide: tables that are equal are one, of others each is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.files.untrusted import are_equal
from roundpipe_cli.model.stored.conversions import find_targets
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.tensors import own_shapes, tied_names

FLAG = "tie_word_embeddings"


def untie_stored(model: nn.Module, folder: Path) -> str | None:
    """Give each table that the files hold a parameter, and change the configuration to say so.

    `model`: the skeleton, tied by its configuration, without adapters. Returns a notice for the user; None where the
    configuration is right.
    """
    untied = list(_untie(model, folder))
    if not untied:
        return None
    if not tied_names(model):  # what is still tied, a bias say, is so by the same flag
        for config in _configs_above(model, untied):
            if getattr(config, FLAG, False):
                setattr(config, FLAG, False)
    return (
        f"the files hold {' and '.join(untied)} beside the embedding, with other values: both are used, though the "
        f"model's configuration says {FLAG}: true; a whole model that is saved says false"
    )


def _untie(model: nn.Module, folder: Path) -> Iterator[str]:
    """Names of the weights that get a parameter of their own, after they got it."""
    tied = tied_names(model)
    if not tied:
        return
    stored = find_stored(folder, torch.float32)
    tables = {target: stored[name] for name, target in find_targets(model, stored, own_shapes(model)).items()}
    names = [name for name, _ in model.named_parameters() if name in tied]
    for name in names:
        first, *others = [one for one in (name, *tied[name]) if one in tables] or [name]
        for other in others:
            one, same = tables[first], tables[other]  # quantised ones are never one table
            if one.is_quantized or same.is_quantized or not are_equal(one.pieces[""], same.pieces[""]):
                path, _, attribute = other.rpartition(".")
                old = model.get_parameter(other)
                fresh = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
                setattr(model.get_submodule(path), attribute, fresh)
                yield other


def _configs_above(model: nn.Module, names: list[str]) -> Iterator[Any]:
    """The model's configurations that may tie these weights: its own, its language model's, those of outer modules."""
    top: Any = model.config
    yield from (top, top.get_text_config())
    for path, module in model.named_modules():
        if hasattr(module, "config") and any(name.startswith(f"{path}.") for name in names):
            yield module.config
