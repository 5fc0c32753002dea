"""Tensors of a model's files for which its architecture has no place: what is left out with a notice, and what is
refused because the model would compute something else without it.

A configuration decides whether there are biases and norms, and how many blocks; the files say which of them were
trained. transformers drops the rest with a warning.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.split import find_blocks
from roundpipe_cli.model.stored.names import base_name, own_shapes

Read = Callable[[], torch.Tensor]
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor of llama.cpp's: what the frequencies of rotary embeddings are divided by."""
AS_SAFETENSORS = "take the same model as safetensors, whose config.json says what it has"
_IN_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)")
"""The part before a block's number, the number, and the name in the block."""
_PART = re.compile(r"\.bias$|norm[^.]*\.(weight|bias)$")
_SWITCH = re.compile(r"bias|norm|tie_word")
"""Keys of a configuration that add or leave out biases and norms, or a table."""


def check_unread(model: nn.Module, where: str, unread: Mapping[str, Read], read: Mapping[str, str]) -> str | None:
    """A notice about tensors that are left out; None where there are none.

    Args:
        model: the skeleton; adapters may be in it.
        where: the model's name.
        unread: name -> reads the tensor.
        read: names of all others -> a weight that is made of them.

    Raises:
        RefusedError: the model's blocks are not those of the files without them.
    """
    if not unread:
        return None
    path = find_blocks(model)[0]
    prefixes = {match[1] for name, target in read.items() if f"{path}." in target and (match := _IN_BLOCK.match(name))}
    blocks: dict[int, set[str]] = defaultdict(set)
    for name in (*read, *unread):
        if (match := _IN_BLOCK.match(name)) and match[1] in prefixes:
            blocks[int(match[2])].add(match[3])
    count = len(list(model.get_submodule(path).children()))
    known = [names for index, names in blocks.items() if index < count]
    more = sorted(index for index, names in blocks.items() if index >= count and names in known)
    if more:
        raise RefusedError(
            "the files hold more blocks than the model's configuration",
            where=where,
            found=f"{count + len(more)} blocks like these",
            expected=f"{count}, num_hidden_layers of the configuration",
            hint="correct num_hidden_layers in config.json, or remove the blocks from the files",
        )
    may_ignore = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    lost = [
        name
        for name, values in unread.items()
        if (match := _IN_BLOCK.match(name)) and match[1] in prefixes and int(match[2]) < count
        if _PART.search(name) and not any(one.search(name) for one in may_ignore) and _matters(name, values())
    ]
    if lost:
        raise RefusedError(
            "the files hold parts of the blocks that the model's configuration leaves out",
            where=where,
            found=f"{len(lost)} tensors, {_some(lost)}",
            expected="blocks as they were trained",
            hint=AS_SAFETENSORS
            if prefixes == {"blk."}
            else switch_for(model, lacking=lost) or "correct config.json, or remove the tensors if they mean nothing",
        )
    if ROPE_FACTORS in unread and not bool((unread[ROPE_FACTORS]() == 1).all()):
        raise RefusedError(
            "the file scales the model's rotary frequencies, which transformers does not read from GGUF files",
            where=where,
            found=ROPE_FACTORS,
            hint=AS_SAFETENSORS,
        )
    which = f"{len(unread)} of the files' tensors, {_some(list(unread))}"
    return f"left out, for they have no place in this architecture: {which}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def _matters(name: str, values: torch.Tensor) -> bool:
    """Whether a bias or a norm changes what is computed: a bias of zeros does not, a mask under its name is none."""
    return values.dim() == 1 and values.is_floating_point() and (not name.endswith(".bias") or bool(values.any()))


def switch_for(model: nn.Module, *, lacking: Iterable[str] = (), unfilled: Collection[str] = ()) -> str | None:
    """A hint: the key of the configuration with which the model has what the files hold; None where no key does.

    Args:
        lacking: tensors of the files without a place in the model.
        unfilled: weights of the model that the files do not have.
    """
    config: Any = model.config
    for key, value in config.get_text_config().to_dict().items():
        if not isinstance(value, bool) or not _SWITCH.search(key):
            continue
        changed = copy.deepcopy(config)
        for part in (changed, changed.get_text_config()):
            if getattr(part, key, None) is value:
                setattr(part, key, not value)
        try:
            other = build_skeleton(changed, torch.bfloat16)
        except RefusedError:
            continue
        own = own_shapes(other)
        needed = {base_name(name) for name, _ in other.named_parameters()}
        if all(name in own for name in lacking) and not needed & set(unfilled):
            return f'"{key}": {str(not value).lower()} in config.json, if the model was trained so'
    return None
