"""Checkpoints of a few tensors, saved as the writer saves a run's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.events import Say
from roundpipe_cli.train.checkpoint.writing import TensorSpec, save_checkpoint, stream_file


def save_groups(
    folder: Path,
    step: int,
    groups: Mapping[str, Mapping[str, torch.Tensor]],
    meta: Mapping[str, Any],
    *,
    keep: int,
    warn: Say = lambda text: None,
) -> Path:
    """One file a group, one after the other, with the larger elements first."""
    pairs = {name: sorted(group.items(), key=lambda pair: -pair[1].dtype.itemsize) for name, group in groups.items()}
    specs = {name: tuple(TensorSpec.of(*pair) for pair in group) for name, group in pairs.items()}
    after_header = ((name, islice(stream_file(specs[name], group), 1, None)) for name, group in pairs.items())
    pieces = ((name, memoryview(piece)) for name, group in after_header for piece in group)
    return save_checkpoint(folder, step, specs, pieces, meta=meta, keep=keep, warn=warn)
