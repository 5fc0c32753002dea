"""Copies between host and device, cut into the chunks that a link carries at a time."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.engine.backends.base import Pair
from roundpipe_cli.engine.dispatch.work import TransferChunk


def chunks_of(pairs: Sequence[Pair], chunk_bytes: int) -> list[TransferChunk]:
    """Copies cut, and put together, to chunks of at most `chunk_bytes`; a tensor with gaps is a chunk of its own."""
    chunks: list[TransferChunk] = []
    pieces: list[Pair] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            chunks.append(TransferChunk(filled, pieces))
        pieces, filled = [], 0

    for target, source in pairs:
        if not (target.is_contiguous() and source.is_contiguous()):
            chunks.append(TransferChunk(source.nbytes, [(target, source)]))
            continue
        target, source = target.view(-1), source.view(-1)
        start = 0
        while start < source.numel():
            count = max(1, (chunk_bytes - filled) // source.element_size())
            end = min(source.numel(), start + count)
            pieces.append((target[start:end], source[start:end]))
            filled += (end - start) * source.element_size()
            start = end
            if filled >= chunk_bytes:
                close()
    close()
    return chunks
