"""Settings of a worker's modules, apart from the model itself."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.model.fused import FusedOps


@dataclass(frozen=True)
class WorkerOptions:
    """Settings of a `WorkerModel`; equal for all workers of a run."""

    mlp_chunk_tokens: int | None = None
    """Tokens of a chunk of the blocks' feed-forward part; None: it is computed whole."""
    fused: FusedOps | None = None
    """Modules that compute by fused operators; None: all by their own code."""
    attends_in_rows: bool = False
    """Blocks get the places of rows instead of a mask of all pairs of tokens; `engine/probe.py` proves it."""
