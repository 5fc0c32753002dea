"""A model, its data and its workers, ready to train."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.settings import head_chunk_tokens
from roundpipe_cli.data.teacher import Teacher
from roundpipe_cli.data.tokenized import Row, TokenizedDataset
from roundpipe_cli.engine.probe import Probe
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.supported import check_mask_bytes
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.model.head import TokenLoss
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.prepare.base_files import BaseFiles
from roundpipe_cli.train.prepare.proof import BuildModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(kw_only=True)
class Setup:
    """A model, its data and its workers, ready to train."""

    recipe: Recipe
    source: ModelSource
    tokenizer: Any
    dataset: TokenizedDataset
    eval_rows: Sequence[Row]
    """Rows that are never trained on; of preference pairs all chosen ones, then all rejected ones."""
    devices: tuple[str, ...]
    model: nn.Module
    """The skeleton, adapters included."""
    peft_model: Any
    """PEFT's model around it, or None for full fine-tuning."""
    split: ModelSplit
    store: WeightStore
    teacher: Teacher | None
    """Figures of the rows, where the objective has a teacher."""
    base_files: BaseFiles
    """Files of the base model that a whole result keeps."""
    model_hash: str = ""
    """Hash of the base weights' files; see `Fingerprint`."""
    config_hash: str = ""
    """See `config_fingerprint`."""
    start_hash: str = ""
    """Hash of the adapter that is trained further; see `start_hash`."""
    fused: FusedOps | None = None
    """Modules that compute by fused operators; None: all by their own code (`kernels: reference`)."""
    unpacks_once: bool = False
    """Packed weights are unpacked once per visit of a stage."""
    build: BuildModel | None = None
    """Makes a smaller model of this kind, for a proof; None: nobody will ask for one."""
    loss: TokenLoss | None = None
    """A program's own training loss; None: cross entropy."""
    kept: dict[str, float] = field(default_factory=dict)
    """Figures that an objective keeps from step to step, which a checkpoint has. A step may be computed again, so the
    number of the step that changed them last belongs to them."""

    @property
    def head_chunk_tokens(self) -> int:
        """Tokens for which the LM head computes logits at once."""
        config: Any = self.model.config
        return head_chunk_tokens(self.recipe.head_chunk_tokens, config.get_text_config().vocab_size)

    @functools.cached_property
    def eval_hash(self) -> str:
        """SHA-256 over all that an evaluation reads of its rows."""
        digest = hashlib.sha256()
        for row in self.eval_rows:
            for array in (row.input_ids, row.labels, row.weights):
                digest.update(b"" if array is None else array.tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def probe(self) -> Probe:
        """Answers what can be known of the blocks before training."""
        return Probe(self.model, self.split, self.store, self.fused)

    @functools.cached_property
    def attends_in_rows(self) -> bool:
        """Whether blocks are told where rows lie, in place of masks of all pairs of tokens.

        Rows are packed or in chunks, or longer than a sliding window, or there are sinks.

        Raises:
            RefusedError: packed rows need masks, which would be too large.
        """
        recipe, longest = self.recipe, int(self.dataset.rows.lengths.max())
        in_chunks = recipe.pipeline.num_chunks > 1
        needed = recipe.packs or in_chunks or self.probe.has_masks(longest)
        how = {"packed": recipe.packs or not in_chunks, "in_chunks": in_chunks}
        if needed and recipe.kernels == "auto" and self.probe.can_attend_in_rows(**how):
            return True
        if recipe.packs:
            check_mask_bytes(max_seq_length=recipe.row_tokens, micro_batch_size=recipe.rows_per_microbatch)
        return False
