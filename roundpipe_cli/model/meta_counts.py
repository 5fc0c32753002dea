"""Numbers of parameters of each layer of a model, counted on the model itself, built without weights.

Done in a child process with limits, since the configuration decides how much is built; the process that asks loads no
torch. Counts are kept in the cache.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe_cli.cache import Remembered
from roundpipe_cli.costs.block_work import MAX_FLASH_WIDTH
from roundpipe_cli.costs.models import ATTENTION_DROPOUT
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.library_names import version
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.sizes import SIZE_NAMES

if TYPE_CHECKING:
    from roundpipe_cli.model.split import ModelSplit

FORMAT = 7
"""Version of the documents; raised when they get another meaning."""
PROCESSOR_S = 120.0
WALL_S = 300.0
MEMORY_BYTES = 128 * 1024**3
"""Address space: most of it is zero pages that stand for embeddings."""

_FIGURES = {
    **{key: names for key, names in SIZE_NAMES.items() if key != "num_hidden_layers"},
    "hidden_size": (*SIZE_NAMES["hidden_size"], "hidden_dim"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "sliding_window": ("sliding_window",),
}
"""Figures for `plan` beside the counts, and the names that configurations have for it."""
_IN_EXPERTS = re.compile(r"(^|\.)experts\.")
_IN_MLP = re.compile(r"mlp|feed_forward|ffn|moe|expert|router|(^|\.)(fc\d|gate|dense_h_to_4h|dense_4h_to_h)\.")


class NotBuiltError(RefusedError):
    """A model that could not be built within the limits; `finetune` might."""


def count_on_meta(config: Mapping[str, Any], name: str, folder: Path | None = None) -> dict[str, Any]:
    """Counts of the model that a config.json describes, which lies in `folder`, if anywhere.

    Returns:
        `blocks`: a list of (count of such blocks in a row, weights of attention's matrices, of the others, of those
        that one token passes through, of all the rest, number of experts); `parameters`: of the whole model;
        `unreached`: of what text never reaches; `boundary`: values per token between two blocks; `tail`: of the head
        layer beside the LM head's matrix; `shared`: of this matrix, if it is the embedding's too; `masks_chunks`: 1
        where no kernel takes a chunk without a mask; `is_eager`: 1 where attention keeps scores; `attention_dropout`;
        and figures of the configuration under the names of `_FIGURES`.

    Raises:
        RefusedError: `finetune` would refuse the model with these words.
        NotBuiltError: it takes too long or too much memory.
    """
    kept = _remembered(config)
    if (known := kept.load()) is not None:
        return dict(known)
    limits = Limits("building the model without weights", name, PROCESSOR_S, MEMORY_BYTES, wall_s=WALL_S)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if folder is None:
                folder = Path(scratch)
                (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            answer = run_limited(functools.partial(_answer, folder, name), limits)
    except RoundpipeError as error:
        problem = error.problems[0]
        raise NotBuiltError(problem.what, where=problem.where, found=problem.found) from None
    if isinstance(answer, RefusedError):
        raise answer
    kept.save(answer)
    return answer


def is_remembered(config: Mapping[str, Any]) -> bool:
    """Whether `count_on_meta` answers at once."""
    return _remembered(config).load() is not None


def _remembered(config: Mapping[str, Any]) -> Remembered:
    key = [FORMAT, version("transformers"), version("torch"), config]
    return Remembered("parameter_counts", json.dumps(key, sort_keys=True, default=str))


def _answer(folder: Path, name: str) -> dict[str, Any] | RefusedError:
    """The counts, or what `finetune` refuses."""
    import torch

    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return counts_of(folder, name)
    except RefusedError as error:
        return error


def counts_of(folder: Path, name: str) -> dict[str, Any]:
    """The document of `count_on_meta` for the folder's config.json, made here and now. Loads torch and transformers."""
    import torch
    from transformers import logging

    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.model.layout import layer_parameters
    from roundpipe_cli.model.load import build_skeleton, load_config
    from roundpipe_cli.model.split import split_model

    logging.set_verbosity_error()
    config = load_config(ModelSource(name, folder))
    model = build_skeleton(config, torch.bfloat16)
    split = split_model(model)
    embed, *blocks, head = layer_parameters(model, split)
    figures = figures_of_model(config.get_text_config(), model, split)
    module: Any = model
    first, last = module.get_input_embeddings().weight, getattr(module.get_output_embeddings(), "weight", None)
    unreached = sum(parameter.numel() for name, parameter in embed if name in split.unreached)
    kinds = (_kinds(block, figures, f"{split.blocks_path}.{i}.") for i, block in enumerate(blocks))
    return {
        **figures,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "unreached": unreached,
        "boundary": split.boundary_columns,
        "tail": sum(parameter.numel() for _, parameter in head if parameter is not last),
        "shared": last.numel() if last is not None and last is first else 0,
        "blocks": [[len(list(run)), *kind] for kind, run in itertools.groupby(kinds)],
    }


def _kinds(block: Iterable[tuple[str, Any]], figures: Mapping[str, Any], prefix: str) -> tuple[int, ...]:
    """Attention's matrices, all others, what of these a token passes through, the rest, and the number of experts."""
    attention = mlp = routed = rest = num_experts = 0
    for name, parameter in block:
        inside, count = name.removeprefix(prefix), parameter.numel()
        listed = re.search(r"(^|\.)experts\.(\d+)\.", inside)
        if _IN_EXPERTS.search(inside):
            routed += count
            stacked = parameter.shape[0] if parameter.dim() > 2 else figures.get("num_experts", parameter.shape[0])
            num_experts = max(num_experts, int(listed[2]) + 1 if listed else stacked)
        elif parameter.dim() < 2:
            rest += count
        elif _IN_MLP.search(inside):
            mlp += count
        else:
            attention += count
    chosen = min(num_experts, figures.get("num_experts_per_tok") or num_experts)
    active = mlp + (routed * chosen // num_experts if num_experts else 0)
    return attention, mlp + routed, active, rest, num_experts


def figures_of_model(text: Any, model: Any, split: ModelSplit) -> dict[str, Any]:
    """Whole numbers of the language model's configuration; the largest of a list."""
    from roundpipe_cli.model.attention import EAGER  # late: they load torch
    from roundpipe_cli.model.chunks import stateful_modules

    figures: dict[str, Any] = {"model_type": str(getattr(text, "model_type", "") or model.config.model_type)}
    places = (text, _attribute(text, "ffn_config"))  # dbrx has its experts there
    for key, names in _FIGURES.items():
        if value := next(filter(None, (_whole(_attribute(place, name)) for place in places for name in names)), 0):
            figures[key] = value
    latent = [_whole(_attribute(text, name)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if all(latent):  # queries and keys are wider than values: products with both, on average
        figures["head_dim"] = sum(latent) // 2
    own = (getattr(text, "per_layer_config", None) or [text]) if _attribute(text, "head_dim") is None else [text]
    widths = [_whole(_attribute(one, "head_dim")) for one in own]
    if all(widths):  # of blocks whose heads have different widths, on average
        figures.setdefault("head_dim", round(sum(widths) / len(widths)))
    is_uneven = all(latent) and latent[0] + latent[1] != latent[2]
    is_eager = model.config._attn_implementation == EAGER
    if is_uneven or max(widths) > MAX_FLASH_WIDTH or is_eager:
        figures["masks_chunks"] = 1
    if is_eager and not any(stateful_modules(model, split)):
        figures["is_eager"] = 1
    figures["attention_dropout"] = max(_attribute(text, name) or 0 for name in ATTENTION_DROPOUT)
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", None)
    figures.setdefault("hidden_size", int(embedding.shape[-1]))
    figures.setdefault("num_attention_heads", 1)
    figures["vocab_size"] = int((embedding if head is None else head).shape[0])
    figures["num_hidden_layers"] = len(model.get_submodule(split.blocks_path))
    kinds = _attribute(text, "layer_types")
    if isinstance(kinds, list) and len(kinds) == figures["num_hidden_layers"]:
        figures["layer_types"] = [str(kind) for kind in kinds]
    return figures


def _attribute(config: Any, name: str) -> Any:
    """None where there is none, or it differs by layer, which configurations say by an error of their own."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _whole(value: Any) -> int:
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return max((one for one in numbers if isinstance(one, int) and not isinstance(one, bool)), default=0)
