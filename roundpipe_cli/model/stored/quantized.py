"""A checkpoint's weights by name, dequantised as they are read where its files hold them quantised.

Each format has its own file. bitsandbytes' 4 bit, which stays packed where that is wanted, is in `quantized_files.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.model.quantization import COMPRESSED, quantization_settings, stored_form
from roundpipe_cli.model.quantized_files import find_nf4
from roundpipe_cli.model.stored.compressed import find_compressed
from roundpipe_cli.model.stored.fp4 import find_modelopt, find_mxfp4
from roundpipe_cli.model.stored.fp8 import find_fp8
from roundpipe_cli.model.stored.tensors import FileTensor, StoredTensor, find_file_tensors, plain
from roundpipe_cli.model.untrusted import read_config

Find = Callable[[Mapping[str, FileTensor], Mapping[str, Any], torch.dtype], dict[str, StoredTensor]]
FORMATS: dict[str, Find] = {
    "fp8": find_fp8,
    "fbgemm_fp8": find_fp8,
    "mxfp4": find_mxfp4,
    "modelopt": find_modelopt,
    COMPRESSED: find_compressed,
    "bitsandbytes": find_nf4,
}
"""By `quant_method` of config.json."""
BESIDE = frozenset(
    {
        *("activation_scale", "input_scale", "input_global_scale", "input_zero_point", "output_scale", "qscale_act"),
        *("k_scale", "v_scale", "q_scale"),
    }
)
"""Last parts of the names of scales of activations and caches, which training does not quantise."""


def find_stored(folder: Path, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Name in the unquantised checkpoint -> weight, of a model folder.

    Args:
        dtype: of the weights that are dequantised.

    Raises:
        RefusedError: the files are quantised in a form that cannot be read, or cannot be read at all.
    """
    config = read_config(folder)
    pieces = find_file_tensors(folder)
    form = stored_form(config, str(folder / "config.json"))
    if form is None:
        return {name: plain(piece) for name, piece in pieces.items()}
    found = FORMATS[form](pieces, quantization_settings(config), dtype)
    used = {piece.key for weight in found.values() for piece in weight.pieces.values()}
    rest = {
        name: plain(piece)
        for name, piece in pieces.items()
        if name not in used and name not in found and name.rpartition(".")[2] not in BESIDE
    }
    return {**rest, **found}
