"""Sequences in chunks on one worker: keys and values of the chunks so far, and the gradients that wait for them.

    forward    chunk 0 -> 1 -> 2        each block's keys and values stay on the worker until the sequence is through,
                  |     |               and go to the host for the backward, like boundary tensors
                  v     v
    backward   chunk 2 -> 1 -> 0        chunk 2's backward makes gradients of the keys and values of chunks 1 and 0;
                                        they are added up (float32) until those chunks' turn comes

Shapes: S tokens of the sequence, B sequences, K key heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from roundpipe_cli.engine.activations import BoundaryKind, MicrobatchState, SequenceChunk
from roundpipe_cli.model.chunks import KeyValues

KINDS = (BoundaryKind.KEYS, BoundaryKind.VALUES)


@dataclass
class BlockSequence:
    """One block's keys and values of one sequence; while it goes backward, with their gradients."""

    buffers: list[torch.Tensor] = field(default_factory=list)
    """Keys and values, [S, B, K, D]: what a chunk adds lies in one piece."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Gradients, float32, of the same shapes; empty while the sequence goes forward."""

    def write(self, chunk: SequenceChunk, own: KeyValues) -> list[torch.Tensor]:
        """Add a chunk's keys and values [B, K, T, D]; returns their pieces [T, B, K, D] of the buffers."""
        pieces = [tensor.detach().permute(2, 0, 1, 3) for tensor in own]
        if not self.buffers:
            self.buffers = [piece.new_empty(chunk.sequence_tokens, *piece.shape[1:]) for piece in pieces]
        for buffer, piece in zip(self.buffers, pieces, strict=True):
            buffer[chunk.start : chunk.end] = piece
        return [buffer[chunk.start : chunk.end] for buffer in self.buffers]

    def fill(self, start: int, pieces: list[torch.Tensor], sequence_tokens: int) -> None:
        """Put pieces [T, B, K, D] that came from the host at their place; there are gradients from now on."""
        if not self.buffers:
            self.buffers = [piece.new_empty(sequence_tokens, *piece.shape[1:]) for piece in pieces]
            self.gradients = [torch.zeros_like(buffer, dtype=torch.float32) for buffer in self.buffers]
        for buffer, piece in zip(self.buffers, pieces, strict=True):
            buffer[start : start + len(piece)] = piece

    def before(self, chunk: SequenceChunk) -> KeyValues | None:
        """Keys and values of the chunks before, [B, K, tokens, D]; None for the first chunk."""
        if chunk.start == 0:
            return None
        keys, values = (buffer[: chunk.start].permute(1, 2, 0, 3) for buffer in self.buffers)
        return keys, values

    def add_gradients(self, chunk: SequenceChunk, gradients: list[torch.Tensor | None]) -> None:
        """Add the gradients of `before` that a chunk's backward has made."""
        for total, gradient in zip(self.gradients, gradients, strict=True):
            if gradient is not None:
                total[: chunk.start].add_(gradient.permute(2, 0, 1, 3))

    def waiting(self, chunk: SequenceChunk, own: KeyValues) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A chunk's own keys and values, each with the gradient that later chunks have made for it."""
        if chunk.is_last:
            return []
        return [
            (tensor, total[chunk.start : chunk.end].permute(1, 2, 0, 3).to(tensor.dtype))
            for tensor, total in zip(own, self.gradients, strict=True)
            if tensor.requires_grad
        ]


class Sequences:
    """A worker's unfinished sequences in one direction, with an entry for each block."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], BlockSequence] = {}
        """(layer, first microbatch of the sequence) -> keys and values."""

    def of(self, layer: int, state: MicrobatchState) -> BlockSequence | None:
        """The keys and values of a layer in the sequence of a chunk; None for a microbatch that is none."""
        if state.chunk is None:
            return None
        return self._found.setdefault((layer, state.index - state.chunk.index), BlockSequence())

    def end(self, layer: int, state: MicrobatchState) -> None:
        """Drop keys and values that this worker does not need again."""
        assert state.chunk is not None
        self._found.pop((layer, state.index - state.chunk.index), None)

    def end_all(self, layers: Iterable[int], state: MicrobatchState) -> None:
        """The same for a stage after a sequence's first chunk, the last to go backward."""
        if state.chunk is not None and state.chunk.index == 0:
            for layer in layers:
                self.end(layer, state)

    def clear(self) -> None:
        self._found.clear()


def chunk_states(
    input_ids: torch.Tensor, indices: torch.Tensor, targets: torch.Tensor, first: int, num_chunks: int
) -> list[MicrobatchState]:
    """The chunks of sequences `input_ids` [B, T] as microbatches, the first of which has the index `first`.

    Args:
        indices: positions of target tokens in B * T; each chunk gets its own, so that its last token's target is the
            next chunk's first.
        targets: their ids.
    """
    rows, places = indices // input_ids.shape[1], indices % input_ids.shape[1]
    missing = num_chunks - input_ids.shape[1]
    if missing > 0:  # at least one token a chunk; added tokens are not trained
        input_ids = torch.cat([input_ids, input_ids[:, -1:].expand(-1, missing)], dim=1)
    states = []
    for chunk in chunks_of_sequence(input_ids.shape[1], num_chunks):
        inside = (places >= chunk.start) & (places < chunk.end)
        index, part = first + chunk.index, input_ids[:, chunk.start : chunk.end]
        own = rows[inside] * part.shape[1] + places[inside] - chunk.start
        states.append(MicrobatchState(index, part, own, targets[inside], chunk=chunk, place=index))
    return states


def chunks_of_sequence(num_tokens: int, num_chunks: int) -> list[SequenceChunk]:
    """Chunks of about equal length; there are at least as many tokens as chunks."""
    bounds = [num_tokens * index // num_chunks for index in range(num_chunks + 1)]
    pieces = enumerate(pairwise(bounds))
    return [SequenceChunk(index, num_chunks, start, end, num_tokens) for index, (start, end) in pieces]
