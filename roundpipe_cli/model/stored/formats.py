"""A checkpoint's weights by name, dequantised as they are read where its files hold them quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.costs.models import quantization_settings
from roundpipe_cli.model.files.quantization import stored_form
from roundpipe_cli.model.files.untrusted import FileTensor, file_tensors, find_shards, read_config
from roundpipe_cli.model.stored.nf4 import find_nf4
from roundpipe_cli.model.stored.scaled_floats import find_fp8, find_mxfp4
from roundpipe_cli.model.stored.tensors import StoredTensor, plain

Find = Callable[[Mapping[str, FileTensor], Mapping[str, Any], torch.dtype], dict[str, StoredTensor]]
FORMATS: dict[str, Find] = {"fp8": find_fp8, "fbgemm_fp8": find_fp8, "mxfp4": find_mxfp4, "bitsandbytes": find_nf4}
"""By `quant_method` of config.json."""
BESIDE = frozenset(
    {*("activation_scale", "input_scale", "output_scale", "qscale_act"), *("k_scale", "v_scale", "q_scale")}
)
"""Last parts of the names of scales of activations and caches, which training does not quantise."""


def find_stored(folder: Path, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Name in the unquantised checkpoint -> weight, of a model folder; `dtype` is that of dequantised ones.

    Raises:
        RefusedError: the files are quantised in a form that cannot be read, or cannot be read at all.
    """
    config = read_config(folder)
    pieces = file_tensors(find_shards(folder))
    form = stored_form(config, str(folder / "config.json"))
    if form is None:
        return {name: plain(piece) for name, piece in pieces.items()}
    weights = FORMATS[form](pieces, quantization_settings(config), dtype)
    used = {piece.key for weight in weights.values() for piece in weight.pieces.values()}
    rest = {
        name: plain(piece)
        for name, piece in pieces.items()
        if name not in used and name not in weights and name.rpartition(".")[2] not in BESIDE
    }
    return {**rest, **weights}
