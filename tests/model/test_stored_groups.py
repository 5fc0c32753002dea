"""Quantised weights whose last block or group is cut off, or whose settings are silent about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.tensors import OpenFiles
from tests.model.test_stored_formats import (
    COMPRESSED,
    DTYPE,
    Made,
    Make,
    Tensors,
    check_one_rounding,
    codes_of,
    fp8,
    group,
    scales_of,
    words_of,
)


def in_groups(bits: int, size: int, groups: int, files: Callable[[torch.Tensor, torch.Tensor], Tensors]) -> Make:
    """Whole numbers of `bits` bits, zero point in the middle, in groups of `size` inputs, the last one cut off."""

    def make(shape: torch.Size, generator: torch.Generator) -> Made:
        codes, scale = codes_of(tuple(shape), bits, generator), scales_of((shape[0], groups), generator, torch.float16)
        weight = (codes - (1 << (bits - 1))).double() * scale.double()[:, torch.arange(shape[1]) // size]
        return files(codes, scale), weight

    return make


def as_packed(codes: torch.Tensor, scale: torch.Tensor) -> Tensors:
    shape = torch.tensor(codes.shape)
    return {"weight_packed": words_of(codes, 4), "weight_scale": scale, "weight_shape": shape}


def as_packed_with_one_zero_point(codes: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {**as_packed(codes, scale), "weight_zero_point": torch.zeros(1, dtype=torch.int8)}


def of_blocks(structure: object) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    return {**COMPRESSED, "format": "float-quantized", "config_groups": {"a": {"weights": weights}}}


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"quant_method": "fp8"}, fp8((128, 128), "weight_scale_inv")),
        (of_blocks("128x128"), fp8((128, 128), "weight_scale")),
        (of_blocks([128, 128]), fp8((128, 128), "weight_scale")),
        (
            {**COMPRESSED, "format": "pack-quantized", "config_groups": {"a": group(4, group_size=128)}},
            in_groups(4, 128, 3, as_packed),
        ),
        (
            {**COMPRESSED, "format": "pack-quantized", "config_groups": {"a": group(4, group_size=128)}},
            in_groups(4, 320, 1, as_packed_with_one_zero_point),
        ),
    ],
)
def test_blocks_and_groups_end_where_the_settings_say(tmp_path: Path, settings: dict[str, Any], make: Make) -> None:
    """Story: 160 rows in two blocks were taken for two of 80 where the block was 128 and the configuration silent, and
    320 inputs in three groups of 128 for three of 107."""
    files, reference = make(torch.Size((160, 320)), torch.Generator().manual_seed(0))
    save_file({f"up_proj.{end}": part for end, part in files.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    with OpenFiles() as opened:
        check_one_rounding(find_stored(tmp_path, DTYPE)["up_proj.weight"].read(opened), reference)


def test_groups_of_an_unknown_size_are_refused(tmp_path: Path) -> None:
    files, _ = in_groups(4, 128, 3, as_packed)(torch.Size((160, 320)), torch.Generator().manual_seed(0))
    save_file({f"up_proj.{end}": part for end, part in files.items()}, tmp_path / "model.safetensors")
    settings = {**COMPRESSED, "format": "pack-quantized", "config_groups": {"a": group(4, group_size=64)}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    with OpenFiles() as opened, pytest.raises(RefusedError, match="not as its format has it"):
        find_stored(tmp_path, DTYPE)["up_proj.weight"].read(opened)
