"""Memory that autograd keeps for a block's backward, measured on a few tokens.

Two lengths, T and 2T, tell how each tensor that is kept grows: not at all, with the tokens, or with the pairs of tokens
of a sequence, as scores of attention and masks do. Where the longer one keeps other tensors, only the sums are told
apart:

    s(T) = a T + b T^2        b = (s(2T) - 2 s(T)) / 2 T^2        a = s(T) / T - b T
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

PROBE_TOKENS = 128
"""Largest shorter length: two of the pieces in which linear attention computes."""
GROWS, GROWS_BY_PAIRS = 1.5, 3.0
"""Factors between the two lengths above which a tensor grows with the tokens, or with their pairs."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes saved by one block."""

    fixed: float
    per_token: float
    per_pair: float
    """Bytes per pair of tokens of one sequence."""

    @staticmethod
    def of_lengths(short: Sequence[int], long: Sequence[int], tokens: int) -> SavedBytes:
        """The bytes from the sizes of the tensors that sequences of `tokens` and of twice as many keep."""
        if len(short) != len(long):
            per_pair = max(0.0, (sum(long) - 2 * sum(short)) / (2 * tokens**2))
            return SavedBytes(0.0, max(0.0, sum(short) / tokens - per_pair * tokens), per_pair)
        fixed = per_token = per_pair = 0.0
        for size, larger in zip(short, long, strict=True):
            if larger > GROWS_BY_PAIRS * size:
                per_pair += larger / (2 * tokens) ** 2
            elif larger > GROWS * size:
                per_token += larger / (2 * tokens)
            else:
                fixed += larger
        return SavedBytes(fixed, per_token, per_pair)

    def of(self, rows: int, tokens: int, context: int) -> int:
        """Bytes of a microbatch of `rows` sequences (or chunks of them) of `tokens` each, which attend to `context`."""
        return int(self.fixed + rows * tokens * (self.per_token + self.per_pair * context))


def saved_sizes(run: Callable[[], object], known: Iterable[torch.Tensor]) -> list[int]:
    """Bytes of each storage that autograd keeps of what `run` computes and returns, in the order of first use.

    Args:
        known: tensors that are there anyway: weights, and what all blocks are called with.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = run()  # while it lives, no other storage gets its address
    del kept
    return list(found.values())
