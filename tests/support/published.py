"""Weights and checkpoints in the forms in which large models are published: MXFP4 and FP8 in blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.choices import BLOCK_SIZE, PackedName
from roundpipe_cli.kernels.unpack_codes import FP4_VALUES
from roundpipe_cli.model.stored.packed_weights import PackedWeight

SETTINGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8_blocks": {"quant_method": "fp8", "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE]},
}


def published(values: torch.Tensor, kind: PackedName) -> PackedWeight:
    """The weight with the nearest codes."""
    if kind == "mxfp4":
        groups = values.float().transpose(-1, -2).unflatten(-1, (-1, 32))
        exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-30))) - 2
        steps = groups / torch.exp2(exponents)[..., None]
        codes = (steps.abs()[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1) + 8 * (steps < 0)
        halves = codes.to(torch.uint8).unflatten(-1, (-1, 2))
        pairs = halves[..., 0] | halves[..., 1] << 4
        return PackedWeight(pairs, (exponents + 127).to(torch.uint8), values.shape, values.dtype, kind)
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values.float(), (0, -columns % BLOCK_SIZE, 0, -rows % BLOCK_SIZE))
    blocks = padded.unflatten(-1, (-1, BLOCK_SIZE)).unflatten(-3, (-1, BLOCK_SIZE))
    scales = blocks.abs().amax((-3, -1)) / 448
    whole = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    codes = whole.to(torch.float8_e4m3fn).contiguous().view(torch.uint8)
    return PackedWeight(codes, scales, values.shape, values.dtype, kind)


def publish(folder: Path, kind: PackedName, part: str = "_proj") -> Path:
    """Rewrite a saved model: matrices whose names hold `part`, of MXFP4 fused experts, in the form."""
    path, files = folder / "model.safetensors", {}
    for name, values in load_file(path).items():
        if part not in name or name.endswith("bias") or values.ndim != (3 if kind == "mxfp4" else 2):
            files[name] = values
            continue
        weight = published(values, kind)
        ends = ("_blocks", "_scales") if kind == "mxfp4" else ("", "_scale_inv")
        codes = weight.codes if kind == "mxfp4" else weight.codes.view(torch.float8_e4m3fn)
        files |= {f"{name}{ends[0]}": codes.contiguous(), f"{name}{ends[1]}": weight.scales.contiguous()}
    save_file(files, path, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": SETTINGS[kind]}))
    return folder
