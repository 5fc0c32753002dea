"""Measurements of a model's blocks, made once before training, on the processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.attention import recurrent_blocks
from roundpipe_cli.model.block_calls import Prologue
from roundpipe_cli.model.chunks import ChunkCache, KeyValues
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.model.last_projection import by_kind
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.worker_model import PROBE_TOKENS, SavedBytes, WorkerModel

NUM_CHUNKS = 3
"""Chunks of a probe's tokens, where feed-forward parts are computed in chunks."""
PROBE_ROWS = (2, 1, 5, 8)
"""Tokens of packed rows that blocks are tried with."""
PROBE_CHUNK = 11
"""Tokens before the chunk that blocks are tried with."""
MAX_ROW_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Allowed relative error of a block's output, by dtype: 4 roundings in 16 bit."""


class Probe:
    """Tries one block of each kind, with its own weights. The modules are made once for all questions."""

    def __init__(self, model: nn.Module, split: ModelSplit, store: WeightStore, fused: FusedOps | None = None) -> None:
        """`fused`: modules that compute by fused operators; None: all by their own code."""
        self._parts, self._fused = (model, split, store), fused
        self._workers: dict[int | None, tuple[WorkerModel, Callable[[int], None]]] = {}
        """By tokens of a chunk of the feed-forward part."""

    def forget(self) -> None:
        """Drop the modules: those of a large model take memory."""
        self._workers.clear()

    def _worker(
        self, chunk_tokens: int | None = None, *, attends_in_rows: bool = False
    ) -> tuple[WorkerModel, Callable[[int], None]]:
        if chunk_tokens not in self._workers:
            self._workers[chunk_tokens] = worker_on_host(*self._parts, self._fused, chunk_tokens=chunk_tokens)
        worker, bind = self._workers[chunk_tokens]
        worker.set_mode(training=True, adapters=True)
        worker.attends_in_rows = attends_in_rows
        return worker, bind

    def find_unread_products(self, *, in_chunks: bool = False) -> dict[int, tuple[str, ...]]:
        """Per block, names of the modules whose products a recompute may leave out, each kind of block proven.

        Runs blocks on 16 tokens; `in_chunks`: with their feed-forward part in chunks.

        Raises:
            RefusedError: the blocks' feed-forward part cannot be computed in chunks.
        """
        worker, bind = self._worker(16 // NUM_CHUNKS if in_chunks else None)
        if in_chunks:
            worker.check_mlp_chunks(bind)
        return worker.find_unread(bind, dropout_seed=0)

    def has_masks(self, tokens: int) -> bool:
        """Whether blocks need more than the causal mask for a row of so many tokens."""
        worker, _ = self._worker(attends_in_rows=True)
        return any(call.holds_rows for call in worker.prologue(worker.probe_ids(1, tokens)).calls)

    def can_attend_in_rows(self, *, packed: bool = True, in_chunks: bool = False) -> bool:
        """Whether all blocks compute the same from the rows' positions as from a mask; runs them both ways.

        Args:
            packed: on several rows to a sequence.
            in_chunks: on a chunk behind another one, whose end is within a row.
        """
        worker, bind = self._worker()
        worker.set_mode(training=False, adapters=True)
        ids = worker.probe_ids(1, sum(PROBE_ROWS))
        positions = torch.cat([torch.arange(tokens) for tokens in PROBE_ROWS])[None] if packed else None
        start = PROBE_CHUNK if in_chunks else None
        by_mask = worker.prologue(ids[:, start or 0 :], None, positions, start)
        worker.attends_in_rows = True
        by_rows = worker.prologue(ids[:, start or 0 :], None, positions, start)
        recurrent = recurrent_blocks(worker.blocks)
        if not all(call.holds_rows or index in recurrent for index, call in enumerate(by_rows.calls)):
            return False

        def run(index: int, way: Prologue, start: int | None, earlier: KeyValues | None) -> tuple[torch.Tensor, Any]:
            cache = None if start is None else ChunkCache(start, len(worker.blocks), earlier)
            hidden = way.calls[index].input_like(way.hidden)
            return worker.run_block(index, way.calls[index], hidden, cache=cache), cache

        def is_same(index: int) -> bool:
            bind(index)
            earlier = None
            if start is not None:
                before = worker.prologue(ids[:, :start], None, None if positions is None else positions[:, :start], 0)
                earlier = run(index, before, 0, None)[1].only(f"block.{index}")
            hidden = by_mask.hidden
            expected, found = (run(index, way, start, earlier)[0].float() for way in (by_mask, by_rows))
            limit = MAX_ROW_ERROR[hidden.dtype] * float(expected.norm())
            return float((found - expected).norm()) <= limit

        try:
            with torch.no_grad():
                return all(by_kind(worker.blocks, by_mask.calls, is_same))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # this attention reads the mask itself

    def find_chunk_pairs(self) -> list[KeyValues]:
        """Per block, the keys and values [1, K, T, D] of a sequence's first chunk, or a recurrent block's states; one
        block of each kind is tried."""
        worker, bind = self._worker()
        worker.set_mode(training=False, adapters=True)
        way = worker.prologue(worker.probe_ids(1, PROBE_CHUNK), start=0)

        def find(index: int) -> KeyValues:
            bind(index)
            cache = ChunkCache(0, len(worker.blocks))
            worker.run_block(index, way.calls[index], way.calls[index].input_like(way.hidden), cache=cache)
            return cache.only(f"block.{index}")

        with torch.no_grad():
            return by_kind(worker.blocks, way.calls, find)

    def find_saved_bytes(
        self,
        mlp_chunk_tokens: int | None = None,
        *,
        attends_in_rows: bool = False,
        longest: int = 2 * PROBE_TOKENS,
        packed: bool = False,
    ) -> list[SavedBytes] | None:
        """Per block, the bytes that autograd keeps for its backward; None where this processor cannot run the blocks.

        Runs blocks forward on a sequence of 128 tokens and one of 256, or of half and all of `longest`. A mask that
        only sequences longer than a sliding window have is not seen.

        Args:
            mlp_chunk_tokens: the feed-forward part is in chunks; the short sequence has three.
            attends_in_rows: see `WorkerModel`.
            packed: several rows to a sequence.
        """
        tokens = max(1, min(PROBE_TOKENS, longest // 2))
        chunk_tokens = None if mlp_chunk_tokens is None else max(1, tokens // NUM_CHUNKS)
        worker, bind = self._worker(chunk_tokens, attends_in_rows=attends_in_rows)
        try:
            return worker.saved_bytes(bind, dropout_seed=0, tokens=tokens, packed=packed)
        except RuntimeError:
            return None


def worker_on_host(
    model: nn.Module, split: ModelSplit, store: WeightStore, fused: FusedOps | None, *, chunk_tokens: int | None = None
) -> tuple[WorkerModel, Callable[[int], None]]:
    """A worker on the processor, and a function that gives one of its blocks the host's weights."""
    views, trainable, host = store.views, store.trainable_names, torch.device("cpu")
    worker = WorkerModel(model, split, views, trainable, device=host, fused=fused, mlp_chunk_tokens=chunk_tokens)

    def bind(block: int) -> None:
        layer = block + 1
        worker.bind(layer, {place.name: place.parameter(store.buffers[layer]) for place in store.layouts[layer].places})

    return worker, bind
