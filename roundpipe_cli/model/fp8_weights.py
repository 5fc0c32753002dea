"""Frozen weights in FP8, e4m3 (arXiv 2209.05433), with a float32 scale for each row.

    weight[row, :] = codes[row, :] * scale[row]            scale[row] = max |weight[row, :]| / 448

448 is the largest number of e4m3, which has a sign, 4 bits of exponent and 3 of mantissa: a weight changes by at most
1/16 of itself, or by 2^-10 of the scale where that is more. A row is what is contiguous: of a linear layer what makes
one output; of GPT-2's Conv1D, and of experts that hold their matrices transposed, what one input contributes.

A row with a weight that is not finite is not a number from end to end, by its scale.
"""

from __future__ import annotations

import torch

LARGEST_E4M3 = 448.0
"""The largest number of e4m3."""
AT_ONCE = 1 << 18
"""Weights that the processor unpacks at once, so that intermediate values stay in its cache."""


def quantize_rows(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, at_once: int) -> None:
    """Write `values` [..., columns] into `codes`, uint8 [values.numel()], and `scales`, float32 [rows].

    Args:
        at_once: weights that are converted at once, if a row is no longer.
    """
    rows = values.reshape(-1, values.shape[-1])
    own_codes = codes.view(torch.float8_e4m3fn).view(rows.shape)
    num_rows = max(1, at_once // max(1, rows.shape[1]))
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows].float()
        scale = scales[start : start + num_rows]
        # a row of zeros, or of the smallest numbers, must not be divided by zero
        torch.clamp(part.abs().amax(1) / LARGEST_E4M3, min=torch.finfo(torch.float32).tiny, out=scale)
        # quotients may round to a number beyond the largest
        own_codes[start : start + num_rows].copy_((part / scale[:, None]).clamp_(-LARGEST_E4M3, LARGEST_E4M3))


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weights, a new tensor; the same on every device: an exact factor, one product in float32, rounded once.

    Args:
        codes: uint8 [shape.numel()].
        scales: float32 [rows].
    """
    rows = codes.view(-1, shape[-1])
    if codes.device.type != "cpu":
        return rows.view(torch.float8_e4m3fn).to(dtype).mul_(scales[:, None]).view(shape)
    # a table: the processor's own conversion takes each number by itself, 2.5 times the time
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    whole = torch.empty(rows.shape, dtype=dtype, device="cpu")
    num_rows = max(1, AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows]
        values = table.index_select(0, part.reshape(-1).int()).view(part.shape)
        torch.mul(values, scales[start : start + num_rows, None], out=values)
        whole[start : start + num_rows].copy_(values)
    return whole.view(shape)
