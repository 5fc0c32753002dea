"""GPTQ and AWQ: whole numbers of few bits in words of 32 bits, with a scale and a zero point for each group of inputs.

    GPTQ (arXiv 2210.17323, as AutoGPTQ writes it)      AWQ (arXiv 2306.00978, as AutoAWQ's GEMM writes it)
      qweight  [in x bits / 32, out]                      qweight  [in, out / 8]
      qzeros   [groups, out x bits / 32]                  qzeros   [groups, out / 8]
      scales   [groups, out]                              scales   [groups, out]
      g_idx    [in], the group of each input

    weight[out, in] = scales[group(in), out] x (q[in, out] - zero[group(in), out])

GPTQ stores zero points less one (its second version as they are), and packs inputs; AWQ packs outputs, in the order
0 2 4 6 1 3 5 7 of each eight. A zero point of 0 becomes the largest number: GPTQModel takes one off all numbers of a
word at once, so that the next one lends it a bit; other programs take it off each alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from roundpipe_cli.model.quantization import gptq_format
from roundpipe_cli.model.stored.scales import groups_in_order, row_ranges, unpack_bits
from roundpipe_cli.model.stored.tensors import FileTensor, StoredTensor

LessOne = Literal["no", "each", "words"]
"""How zero points were diminished before they were stored."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that each of a word's numbers belongs to."""
AWQ_BITS = 4
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""Bits -> a word whose numbers are all 1."""


def find_gptq(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in GPTQ."""
    bits, group_size = int(settings["bits"]), int(settings.get("group_size") or -1)
    less_one: LessOne = "words" if "gptqmodel" in str(settings.get("meta")).lower() else "each"
    if gptq_format(settings) == "gptq_v2":
        less_one = "no"
    found = {}
    for name, parts in _modules(pieces, ("qweight", "qzeros", "scales", "g_idx")).items():
        num_words, num_out = parts["qweight"].shape
        num_in = parts["g_idx"].shape[0] if "g_idx" in parts else num_words * 32 // bits
        own_bits = num_words * 32 // num_in  # layers may have their own
        shape = torch.Size((num_out, num_in))
        unpack = partial(_unpack_gptq, bits=own_bits, less_one=less_one, group_size=group_size)
        found[name] = StoredTensor(parts, shape, dtype, unpack)
    return found


def find_awq(
    pieces: Mapping[str, FileTensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The weights in AWQ."""
    found, group_size = {}, int(settings.get("group_size") or settings.get("q_group_size") or -1)
    for name, parts in _modules(pieces, ("qweight", "qzeros", "scales")).items():
        shape = torch.Size((parts["qweight"].shape[1] * 32 // AWQ_BITS, parts["qweight"].shape[0]))
        found[name] = StoredTensor(parts, shape, dtype, partial(_unpack_awq, group_size=group_size))
    return found


def _modules(pieces: Mapping[str, FileTensor], roles: tuple[str, ...]) -> dict[str, dict[str, FileTensor]]:
    """Name of a weight -> its tensors by role."""
    modules = [key.removesuffix(".qweight") for key in pieces if key.endswith(".qweight")]
    return {
        f"{module}.weight": {role: pieces[f"{module}.{role}"] for role in roles if f"{module}.{role}" in pieces}
        for module in modules
    }


def _unpack_gptq(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, bits: int, less_one: LessOne, group_size: int
) -> torch.Tensor:
    words, scales = parts["qweight"], parts["scales"].float()
    num_out = words.shape[1]
    num_in = words.shape[0] * 32 // bits
    zeros = _zero_points(parts["qzeros"], bits, num_out, less_one).float()
    groups = parts["g_idx"].long() if "g_idx" in parts else groups_in_order(num_in, len(scales), [group_size])
    whole = torch.empty(num_out, len(groups), dtype=dtype)
    for rows in row_ranges(len(groups), num_out):
        of_rows = words[rows.start * bits // 32 : -(-rows.stop * bits // 32)]
        codes = unpack_bits(of_rows.T, bits, rows.stop - rows.start).T
        whole[:, rows] = (scales[groups[rows]] * (codes - zeros[groups[rows]])).T.to(dtype)
    return whole


def _zero_points(words: torch.Tensor, bits: int, count: int, less_one: LessOne) -> torch.Tensor:
    if less_one == "words" and bits in ONES:
        return unpack_bits((words.long() & 0xFFFFFFFF) + ONES[bits], bits, count)
    return (unpack_bits(words, bits, count) + (less_one != "no")) & ((1 << bits) - 1)


def _unpack_awq(parts: Mapping[str, torch.Tensor], dtype: torch.dtype, group_size: int) -> torch.Tensor:
    words, scales = parts["qweight"], parts["scales"].float()
    num_in, num_out = words.shape[0], words.shape[1] * 32 // AWQ_BITS
    zeros = _in_order(unpack_bits(parts["qzeros"], AWQ_BITS, num_out)).float()
    groups = groups_in_order(num_in, len(scales), [group_size])
    whole = torch.empty(num_out, num_in, dtype=dtype)
    for rows in row_ranges(num_in, num_out):
        codes = _in_order(unpack_bits(words[rows], AWQ_BITS, num_out))
        whole[:, rows] = (scales[groups[rows]] * (codes - zeros[groups[rows]])).T.to(dtype)
    return whole


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of AWQ's words in the order of the outputs."""
    place = torch.tensor([AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))])
    ordered: torch.Tensor = codes.reshape(*codes.shape[:-1], -1, len(AWQ_ORDER))[..., place].flatten(-2)
    return ordered
