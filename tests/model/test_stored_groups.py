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
from roundpipe_cli.model.quantization import stored_form
from roundpipe_cli.model.stored.quantized import find_stored
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


def as_awq(codes: torch.Tensor, scale: torch.Tensor) -> Tensors:
    order = torch.tensor([8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8] for n in range(len(codes))])
    zeros = words_of(torch.full_like(scale.T, 8).long(), 4)
    return {"qweight": words_of(codes.T[:, order], 4), "qzeros": zeros, "scales": scale.T.contiguous()}


def as_gptq(codes: torch.Tensor, scale: torch.Tensor) -> Tensors:
    zeros = words_of(torch.full_like(scale.T, 7).long(), 4)
    return {"qweight": words_of(codes, 4).T.contiguous(), "qzeros": zeros, "scales": scale.T.contiguous()}


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
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, in_groups(4, 128, 3, as_awq)),
        ({"quant_method": "awq", "bits": 4}, in_groups(4, 64, 5, as_awq)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, in_groups(4, 128, 3, as_gptq)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, in_groups(4, 32, 10, as_gptq)),
    ],
)
def test_blocks_and_groups_end_where_the_settings_say(tmp_path: Path, settings: dict[str, Any], make: Make) -> None:
    """Story: 160 rows in two blocks were taken for two of 80 where the block was 128 and the configuration silent, and
    320 inputs in three groups of 128 for three of 107; of AWQ without a group size only the first group was read."""
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


def gptq_from_zero(shape: torch.Size, bits: int, less_one: str) -> Made:
    """Zero points from 0 on, as files without symmetry have them."""
    generator = torch.Generator().manual_seed(0)
    codes, zeros = codes_of(tuple(shape), bits, generator), codes_of((5, shape[0]), bits, generator)
    scale = scales_of((5, shape[0]), generator, torch.float16)
    groups = torch.arange(shape[1]) // 64
    weight = (codes - zeros[groups].T).double() * scale[groups].T.double()
    stored = words_of(zeros if less_one != "each" else (zeros - 1) % (1 << bits), bits)
    if less_one == "words":  # numpy's and torch's int32 wrap around
        ones = sum(1 << place for place in range(0, 32, bits))
        stored = stored - torch.tensor(ones - (1 << 32 if ones >> 31 else 0), dtype=torch.int32)
    files = {"qweight": words_of(codes, bits).T.contiguous(), "qzeros": stored, "scales": scale}
    return {**files, "g_idx": groups.int()}, weight


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("less_one", "more"),
    [("each", {}), ("words", {"meta": {"quantizer": ["gptqmodel:4.2.5"]}}), ("no", {"format": "gptq_v2"})],
)
def test_zero_points_of_zero(tmp_path: Path, bits: int, less_one: str, more: dict[str, Any]) -> None:
    """Story: 0 less one is stored as the largest number, which was read as one more than that; GPTQModel, which alone
    writes such files today, borrows from the next number, which was then one too small."""
    files, reference = gptq_from_zero(torch.Size((160, 320)), bits, less_one)
    save_file({f"up_proj.{end}": part for end, part in files.items()}, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": False, **more}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    with OpenFiles() as opened:
        check_one_rounding(find_stored(tmp_path, DTYPE)["up_proj.weight"].read(opened), reference)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 3, "format": "gptq_p"}, "gptq_p"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype: int16"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation: hadamard"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 4, "rotation": "hadamard"}, "rotation: hadamard"),
    ],
)
def test_arrangements_that_are_not_read_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    """Story: GPTQModel 7.7 writes these; they were taken for the usual arrangement."""
    with pytest.raises(RefusedError) as refused:
        stored_form({"quantization_config": settings}, "config.json")
    assert said in str(refused.value.problems[0].found)
    usual = {"quant_method": settings["quant_method"], "bits": 4, "pack_dtype": "int32", "rotation": None}
    assert stored_form({"quantization_config": usual}, "config.json") == settings["quant_method"]
