"""Sizes in a model's configuration: their names, and limits to check before anything loops over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from roundpipe_cli.errors import RefusedError

MAX_LAYERS = 2048
"""The deepest published decoders have a few hundred."""
MAX_EXPERTS = 1 << 16
"""Limit of the sizes of one layer, of bytes of an expert's width, and of labels, each of which is given a name."""
MAX_MODULES = 1 << 17
"""Experts of all layers: each is a module that is built."""
MAX_WIDTH = 1 << 27
"""Vocabulary and every width; the largest vocabularies have 2^18 entries."""
MAX_NUMBER = 1 << 48
"""Any other whole number."""

SIZE_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"),
        *("top_k_experts", "top_k", "moe_top_k"),
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
"""Names that model types have for one size, the usual one first."""

_ROWS_AS_EXPERTS = {"doge"}
"""Types whose experts are rows of a table; doge's own default is 16,384 in each of 32 layers."""

_LIMITS = (
    (re.compile(r"(^|_)(layers?|attention_types)$"), MAX_LAYERS),
    (re.compile(r"(experts?(_|$)|(^|_)labels$)"), MAX_EXPERTS),
    (re.compile(r"(size|dim|rank|heads?|embd|inner|d_model|positions?|position_embeddings|n_ctx)$"), MAX_WIDTH),
)


def size_of(places: Sequence[Any], names: Iterable[str]) -> int:
    """The first whole number above 0 that configurations have under one of the names; 0 where none has one."""
    values = (getattr(place, name, None) for place in places for name in names)
    return next((one for one in values if isinstance(one, int) and not isinstance(one, bool) and one > 0), 0)


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration with a size that no model has.

    Raises:
        RefusedError: naming key, value and limit.
    """
    layers, experts, found, expected = 1, 1, "", ""
    has_modules = str(config.get("model_type")) not in _ROWS_AS_EXPERTS
    for key, value in _whole_numbers(config):
        limit = next((limit for pattern, limit in _LIMITS if pattern.search(key)), MAX_NUMBER)
        if abs(value) > limit:
            shown = f"{value:,}" if abs(value) < 2**70 else "a number of more than 20 digits"
            found, expected = f"{key}: {shown}", f"at most {limit:,}"
            break
        layers = max(layers, value if limit == MAX_LAYERS else 1)
        experts = max(experts, value if re.search(r"experts$", key) and has_modules else 1)
    if not found and layers * experts > MAX_MODULES:
        found, expected = f"{layers:,} layers with {experts:,} experts", f"at most {MAX_MODULES:,} in all layers"
    if found:
        what = "the model's configuration has a size that no model has"
        raise RefusedError(what, where=where, found=found, expected=expected)


def _whole_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(key, number) at every depth; a loop, since depth is the file's choice."""
    rest: list[tuple[str, Any]] = [("", config)]
    while rest:
        key, value = rest.pop()
        if isinstance(value, Mapping):
            rest.extend((str(inner), item) for inner, item in value.items())
        elif isinstance(value, list):
            rest.extend((key, item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value
