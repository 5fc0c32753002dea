"""Refusals of packed rows and of sequences in chunks: `plan` and `finetune` use the same rules. No torch."""

from __future__ import annotations

from collections.abc import Collection

from roundpipe_cli.errors import RefusedError

MAX_MASK_BYTES = 512 * 1024**2
"""Size of one mask of one microbatch, a byte for each pair of tokens: 23,170 tokens in one sequence."""


def packing_refusal(where: str, found: str) -> RefusedError:
    """The error for a model whose packed rows would see each other."""
    return RefusedError(
        "this model cannot train on packed rows: they would see each other",
        where=f"packing: {where}",
        found=found,
        expected="blocks whose attention masks separate the rows",
        hint="packing=false",
    )


def chunk_refusal(where: str, found: str, expected: str = "blocks of attention") -> RefusedError:
    """The error for a model that cannot take a sequence in chunks."""
    return RefusedError(
        "this model cannot train on sequences in chunks",
        where=f"pipeline.sequence_chunks: {where}",
        found=found,
        expected=expected,
        hint="pipeline.sequence_chunks=1",
    )


def check_mask_bytes(*, max_seq_length: int, micro_batch_size: int) -> None:
    """Refuse packed sequences whose attention masks, a byte for each pair of tokens, exceed `MAX_MASK_BYTES`."""
    mask_bytes = micro_batch_size * max_seq_length**2
    if mask_bytes > MAX_MASK_BYTES:
        raise RefusedError(
            "packed sequences of this length need attention masks that are too large",
            where="packing",
            found=f"max_seq_length {max_seq_length}, micro_batch_size {micro_batch_size}: {mask_bytes} bytes a mask",
            expected=f"at most {MAX_MASK_BYTES} bytes",
            hint=f"max_seq_length={int((MAX_MASK_BYTES / micro_batch_size) ** 0.5)} or packing=false",
        )


def scaled_by_length(kinds: Collection[str], limit: int | None, max_seq_length: int) -> str | None:
    """The error for position scaling that depends on the longest row of a batch, so that rows depend on others.

    `kinds` are transformers' names of scalings, `limit` the tokens up to which positions are not scaled; None: always.
    """
    above = limit or max_seq_length
    if not set(kinds) & {"dynamic", "longrope"} or max_seq_length <= above:
        return None
    return f"position scaling by length ({', '.join(sorted(kinds))}) above {above} tokens"
