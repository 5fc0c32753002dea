"""Tables that a configuration ties while the files hold each of them: the LM head beside the embedding.

As in transformers' loader the files decide: tables that are equal are one, of others each is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.stored.conversions import find_targets
from roundpipe_cli.model.stored.names import own_shapes, tied_names
from roundpipe_cli.model.stored.quantized import find_stored
from roundpipe_cli.model.stored.tensors import StoredTensor
from roundpipe_cli.model.untrusted import are_equal, tensor_places

FLAG = "tie_word_embeddings"


def untie_stored(model: nn.Module, folder: Path) -> str | None:
    """Give each table that the files hold a parameter, and change the configuration to say so.

    Args:
        model: the skeleton, tied by its configuration, without adapters.
        folder: of safetensors files.

    Returns:
        a notice for the user; None where the configuration is right.

    Raises:
        RefusedError: files that cannot be read.
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
    found = {target: stored[name] for name, target in find_targets(model, stored, own_shapes(model)).items()}
    names = [name for name, _ in model.named_parameters() if name in tied]
    for name in names:
        first, *others = [one for one in (name, *tied[name]) if one in found] or [name]
        for other in others:
            if not _are_equal(found[first], found[other]):
                path, _, attribute = other.rpartition(".")
                old = model.get_parameter(other)
                fresh = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
                setattr(model.get_submodule(path), attribute, fresh)
                yield other


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether both are one table, by their bytes; quantised ones are not."""
    if first.is_quantized or second.is_quantized:
        return False
    one, other = (weight.pieces[""] for weight in (first, second))
    return are_equal(tensor_places(one.path)[one.key], tensor_places(other.path)[other.key])


def _configs_above(model: nn.Module, names: list[str]) -> Iterator[Any]:
    """The model's configurations that may tie these weights: its own, its language model's, those of outer modules."""
    top: Any = model.config
    yield from (top, top.get_text_config())
    for path, module in model.named_modules():
        if hasattr(module, "config") and any(name.startswith(f"{path}.") for name in names):
            yield module.config
