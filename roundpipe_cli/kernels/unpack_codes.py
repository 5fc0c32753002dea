"""Weights from codes and scales, each times the other: an operator that dispatch modes see, one kernel on a GPU.

    weight[i] = value(code[i]) * scale[i // group]      group = weights / scales

Values of codes are tables: of 8-bit floats, a code a byte, or of E2M1, two a byte, the low half first.
The product is one in float32, rounded once to the type that is asked for, on every device.
"""

from __future__ import annotations

from functools import cache

import torch

from roundpipe_cli.kernels.random_masks import has_kernel

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3); 8 to 15 are their negatives."""
E8M0_BIAS = 127
AT_ONCE = 1 << 18
"""Weights that the processor unpacks at once, so that intermediate values stay in its cache."""
DEVICE_AT_ONCE = 1 << 24
"""Weights that a GPU on which our kernels do not run unpacks at once: intermediate values take 16 bytes each."""


@cache
def code_values(kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Float32 [256]: what codes of a type of 8-bit floats stand for; [16] of E2M1."""
    if kind == torch.float4_e2m1fn_x2:
        return torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device="cpu").to(device)
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(kind).float().to(device)


@cache
def powers(device: torch.device) -> torch.Tensor:
    """Float32 [256]: what a scale of the type E8M0 stands for."""
    return torch.exp2(torch.arange(256, device="cpu").float() - E8M0_BIAS).to(device)


def unpack_codes(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, shape: torch.Size, *, dtype: torch.dtype
) -> torch.Tensor:
    """The weights of `shape` and `dtype`.

    Args:
        codes: uint8, one a byte, or two where there are 16.
        scales: float32, or exponents as uint8; each for as many weights in a row as the numbers say.
        values: of `code_values`.
    """
    if codes.device.type == "cpu" and not has_kernel(codes):  # an operator loads torch._dynamo, 76 MB
        return _by_tables(codes, scales, values, shape.numel(), dtype=dtype).view(shape)
    found: torch.Tensor = _unpack_codes(codes, scales, values, shape.numel(), dtype)
    return found.view(shape)


@torch.library.custom_op("roundpipe::unpack_codes", mutates_args=())
def _unpack_codes(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, count: int, dtype: torch.dtype
) -> torch.Tensor:
    if has_kernel(codes):
        from roundpipe_cli.kernels.pointwise_triton import launch_unpack

        return launch_unpack(codes, scales, values, count, dtype=dtype)
    return _by_tables(codes, scales, values, count, dtype=dtype)


def _by_tables(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, count: int, *, dtype: torch.dtype
) -> torch.Tensor:
    per_byte, group = 1 + (len(values) == 16), count // max(1, scales.numel())
    whole = torch.empty(count, dtype=dtype, device=codes.device)
    table = values
    if per_byte == 2:  # both values of a byte as one number of 64 bits
        table = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.int64).view(-1)
    at_once = AT_ONCE if codes.device.type == "cpu" else DEVICE_AT_ONCE
    step = max(1, at_once // max(1, group)) * group
    for start in range(0, count, max(1, step)):
        part = whole[start : start + step]
        own = codes.view(-1)[start // per_byte :][: len(part) // per_byte].int()
        factors = scales.view(-1)[start // group :][: len(part) // group]
        if factors.dtype == torch.uint8:
            factors = powers(codes.device).index_select(0, factors.int())
        products = table.index_select(0, own).view(torch.float32).view(-1, group).mul_(factors[:, None])
        part.view(-1, group).copy_(products)
    return whole


_unpack_codes.register_fake(lambda codes, scales, values, count, dtype: codes.new_empty(count, dtype=dtype))
