"""What autograd keeps of a block for its backward, measured on a few tokens.

Most of it grows with the tokens. Where scores of attention or masks are kept, that part grows with the pairs of tokens
of a sequence. Two lengths tell the two apart:

    s(T) = a T + b T^2        b = (s(2T) - 2 s(T)) / 2 T^2        a = s(T) / T - b T

Whatever does not grow at all counts as if it did, which errs on the safe side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

PROBE_TOKENS = 128
"""The shorter length, at most: two of the pieces in which linear attention goes."""


@dataclass(frozen=True)
class SavedBytes:
    """Of one block."""

    per_token: float
    per_pair: float
    """Of tokens of one sequence, each with each."""

    @staticmethod
    def of_lengths(short: int, long: int, tokens: int) -> SavedBytes:
        """From what sequences of `tokens` and of twice as many keep."""
        per_pair = max(0.0, (long - 2 * short) / (2 * tokens**2))
        return SavedBytes(max(0.0, short / tokens - per_pair * tokens), per_pair)

    def of(self, rows: int, tokens: int, context: int) -> int:
        """Bytes of a microbatch of `rows` sequences (or chunks of them) of `tokens` each, which attend to `context`."""
        return int(rows * tokens * (self.per_token + self.per_pair * context))


def saved_bytes(run: Callable[[], object], known: Iterable[torch.Tensor]) -> int:
    """Bytes that autograd keeps of what `run` computes and returns, whole storages.

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
        kept = run()  # while it lives, no storage's address is given away again
    total = sum(found.values())
    del kept
    return total
