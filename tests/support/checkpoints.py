"""Checkpoints of a few tensors, saved as the writer saves a run's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.events import Say
from roundpipe_cli.train.checkpoint.writing import TensorSpec, save_checkpoint, stream_file

Stream = tuple[tuple[TensorSpec, ...], Iterable[tuple[str, torch.Tensor]]]
"""What `stream_file` takes."""
Group = Mapping[str, torch.Tensor] | Stream


def save_groups(
    folder: Path,
    step: int,
    groups: Mapping[str, Group],
    meta: Mapping[str, Any],
    *,
    keep: int,
    warn: Say = lambda text: None,
) -> Path:
    """One file a group, one after the other; of a mapping the larger elements first."""
    streams = {name: _stream(group) for name, group in groups.items()}
    specs = {name: announced for name, (announced, _) in streams.items()}
    return save_checkpoint(folder, step, specs, _pieces(streams), meta=meta, keep=keep, warn=warn)


def _pieces(streams: Mapping[str, Stream]) -> Iterator[tuple[str, memoryview]]:
    for name, stream in streams.items():
        pieces = stream_file(*stream)
        next(pieces)  # the header
        yield from ((name, memoryview(piece)) for piece in pieces)


def _stream(group: Group) -> Stream:
    if isinstance(group, tuple):
        return group
    pairs = sorted(group.items(), key=lambda pair: -pair[1].dtype.itemsize)
    return tuple(TensorSpec.of(name, tensor) for name, tensor in pairs), pairs
