"""A model's architecture from counts of the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roundpipe_cli.costs.models import Architecture, Block, parse_config

_COUNTS = ("parameters", "unreached", "boundary", "tail", "shared", "blocks")


def built_architecture(counts: Mapping[str, Any], *, name: str, source: str) -> Architecture:
    """The architecture of a model that was counted.

    Args:
        counts: the figures of a configuration under the names of `parse_config`; `parameters`, of the whole model;
            `unreached`, by text; `boundary`, values per token between two blocks; `tail`, of the head layer beside the
            LM head's matrix; `shared`, of this matrix with the embedding; `blocks`: (such blocks in a row, weights of
            attention's matrices, of all other matrices, of those that one token passes through, of all the rest, number
            of experts).

    Raises:
        RefusedError: a figure is missing or impossible.
    """
    figures = {key: value for key, value in counts.items() if key not in _COUNTS}
    figures["tie_word_embeddings"] = bool(counts["shared"])
    shape = parse_config(figures, name=name, source=source)
    rows = [row for count, *row in counts["blocks"] for _ in range(count)]
    blocks = tuple(_block(*row, window=one.window) for row, one in zip(rows, shape.blocks, strict=True))
    found = replace(shape, blocks=blocks, tail_params=counts["tail"], is_guess=False)
    embed_params = found.embed_params + counts["parameters"] - found.parameters
    unreached, columns = counts["unreached"], counts["boundary"]
    return replace(found, embed_params=embed_params, unreached_params=unreached, boundary_columns=columns)


def _block(attention: int, mlp: int, active: int, rest: int, num_experts: int, *, window: int | None) -> Block:
    return Block(attention, mlp, active, rest, num_experts, window)
