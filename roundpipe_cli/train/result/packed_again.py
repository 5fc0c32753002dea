"""Weights in the form of their base's files again: 8-bit and 4-bit floats with scales, after an adapter was added.

Scales stay as they were published, so that what the adapter leaves alone keeps its bits; where a block has outgrown its
scale, that is doubled until its largest weight has a code. A changed weight takes one of the two codes around it, by
chance, the nearer one more often, so that their mean is the weight: the nearest would nearly always be the one that it
had, and the adapter lost, as it changes a weight by less than half a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe_cli.kernels.unpack_codes import E8M0_BIAS, FP4_VALUES
from roundpipe_cli.model.stored.tensors import StoredTensor
from roundpipe_cli.train.checkpoint.writing import DTYPE_NAMES

CODES: Mapping[torch.dtype, tuple[float, float, int, int]] = {
    **{torch.float8_e4m3fn: (448.0, 464.0, 3, -6), torch.float8_e5m2: (57344.0, 61440.0, 2, -14)},
    **{torch.int8: (6.0, 7.0, 1, 0), torch.uint8: (6.0, 7.0, 1, 0)},
}
"""Type of codes in the files -> their largest value, what still rounds to it, bits of their mantissa, least exponent; a
byte that is no float holds two of 4 bit (E2M1)."""
SEED, ONES = 20291129, 0x22
"""Seed of the codes' random numbers; a byte of two codes that mean 1."""
Merge = Callable[[int, slice, torch.Tensor], torch.Tensor]
"""Takes the number of an expert, 0 where there are none, and rows of its base weight [out, in]: which, and their values
in float32; returns the sum."""


class Rounding:
    """Errors of the weights that were packed again, and the random numbers of their codes, the same in every run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)
        self.count, self.largest, self._sums = 0, 0.0, torch.zeros(3, dtype=torch.float64)

    def add(self, base: torch.Tensor, merged: torch.Tensor, packed: torch.Tensor) -> None:
        """Count a weight."""
        error, change = (packed - merged).abs_(), merged - base
        self.count, self.largest = self.count + error.numel(), max(self.largest, float(error.max()))
        kept = ((packed - base) * change).sum()  # in the change's own direction
        self._sums += torch.stack([error.sum(), kept, change.square().sum()])

    def figures(self) -> dict[str, float]:
        """Number of weights, their mean and largest error, the share of the adapter's change that is there."""
        if not self.count:
            return {}
        error, kept, change = self._sums.tolist()
        share = kept / change if change else 1.0
        return {"weights": self.count, "mean": error / self.count, "largest": self.largest, "change_kept": share}

    def __str__(self) -> str:
        found = self.figures()
        off = f"a changed weight is off by {found['mean']:.2g} on average, {found['largest']:.2g} at most"
        kept = f"{found['change_kept']:.0%} of the change is there (--dtype bfloat16: all)"
        return f"packed again as published: {off}; {kept}"


def can_pack(weight: StoredTensor) -> bool:
    """Whether a quantised weight of the files can be packed again."""
    is_known = tuple(weight.pieces) in (("codes", "scale"), ("blocks", "scales")) and len(weight.shape) <= 3
    pieces = list(weight.pieces.values())
    has_own_scales = len(weight.shape) < 3 or pieces[1].shape[:1] == (weight.shape[0],)
    return is_known and has_own_scales and all(piece.dtype in DTYPE_NAMES.values() for piece in pieces)


def pack_again(
    weight: StoredTensor, parts: Mapping[str, torch.Tensor], merge: Merge, rounding: Rounding
) -> dict[str, torch.Tensor]:
    """The weight's tensors by role with an adapter added, some rows in memory at a time; `parts`: as published."""
    unpack: Any = weight.unpack
    is_mxfp4 = "blocks" in parts

    def read(*own: torch.Tensor) -> torch.Tensor:
        """[rows, in] of codes and scales"""
        sizes = (width, len(own[0])) if is_mxfp4 else (len(own[0]), width)
        options, roles = {**unpack.keywords, "shape": torch.Size((1, *sizes))}, dict(zip(parts, own, strict=True))
        found: torch.Tensor = unpack.func({role: one[None] for role, one in roles.items()}, torch.float32, **options)[0]
        return found.T.contiguous() if is_mxfp4 else found

    width = unpack.keywords["shape"][-2 if is_mxfp4 else -1]
    made = {role: torch.empty_like(part) for role, part in parts.items()}
    experts = [whole if len(weight.shape) == 3 else whole[None] for whole in (*parts.values(), *made.values())]
    for number, whole in enumerate(zip(*experts, strict=True)):
        start = 0
        for codes, scales, *new in _in_rows(whole, width, unpack.keywords.get("block", (1, 1))[0]):
            rows, base = slice(start, start + len(codes)), read(codes, scales)
            start = rows.stop
            ones = (
                torch.ones(codes.shape).to(codes.dtype) if codes.is_floating_point() else torch.full_like(codes, ONES)
            )
            index = read(ones, torch.arange(scales.numel()).float().reshape(scales.shape)).long()
            merged = merge(number, rows, base)
            merged = torch.where(merged == base, base, merged)  # -0 too
            chances = torch.rand(base.shape, generator=rounding.generator).masked_fill_(merged == base, 0.5)
            new[1].copy_(_grown(scales, index, merged, CODES[codes.dtype][1]))
            new[0].copy_(_codes(merged / _as_floats(new[1]).flatten()[index], chances, codes))
            rounding.add(base, merged, read(*new))
    return made


WEIGHTS_AT_ONCE = 1 << 20
"""Weights in the rows that are packed at once: temporary values take 60 bytes for each."""


def _in_rows(whole: Sequence[torch.Tensor], width: int, block: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """A matrix's codes and scales, and tensors of the same shapes, cut to rows that share no scale with others."""
    codes, scales = whole[:2]
    if scales.numel() == 1:
        return iter([tuple(whole)])
    of_scale = block if -(-len(codes) // block) == len(scales) else len(codes) // len(scales)
    count = max(1, WEIGHTS_AT_ONCE // (width * of_scale))
    pieces = (one.split(count if number % 2 else count * of_scale) for number, one in enumerate(whole))
    return zip(*pieces, strict=True)


def _as_floats(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.float() - E8M0_BIAS) if scales.dtype == torch.uint8 else scales.float()


def _grown(scales: torch.Tensor, index: torch.Tensor, merged: torch.Tensor, most: float) -> torch.Tensor:
    """The scales, doubled where a weight of their block is above `most` of them; `index`: of each weight's scale."""
    largest = torch.zeros(scales.numel()).scatter_reduce(0, index.flatten(), merged.abs().flatten(), "amax")
    old = _as_floats(scales).clamp(min=2.0**-E8M0_BIAS)
    doublings = torch.log2((largest.reshape(scales.shape) / (old * most)).clamp(min=1.0)).ceil()
    if scales.dtype == torch.uint8:
        return (scales + doublings).to(torch.uint8)
    return torch.where(doublings > 0, old * torch.exp2(doublings), _as_floats(scales)).to(scales.dtype)


def _codes(values: torch.Tensor, chances: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A code for each value [out, in], shaped as `like`: below it, or the next if its step's part and chance make 1."""
    largest, _, bits, least = CODES[like.dtype]
    values = values.nan_to_num_(nan=0.0)  # 0 / 0
    steps = torch.exp2((torch.frexp(values).exponent - 1).clamp_(min=least) - bits)
    sizes = (values.abs() / steps).add_(chances).floor_().mul_(steps).clamp_(max=largest)
    if like.is_floating_point():
        return sizes.copysign_(values).to(like.dtype).reshape(like.shape)
    codes = torch.bucketize(sizes.contiguous(), torch.tensor(FP4_VALUES)).to(torch.uint8) | (
        values.signbit().to(torch.uint8) << 3
    )
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous().view(like.dtype).reshape(like.shape)
