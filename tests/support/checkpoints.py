"""Checkpoints of a few tensors, saved as the writer saves a run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.events import Say
from roundpipe_cli.train.checkpoint.writing import FileSet, TensorSpec, TensorStream, save_checkpoint, stream_file

Group = Mapping[str, torch.Tensor] | TensorStream


def save_groups(
    folder: Path, step: int, groups: Mapping[str, Group], meta: Mapping[str, Any], *, keep: int, warn: Say | None = None
) -> Path:
    """One file a group, one after the other; of a mapping the larger elements first."""
    streams = {name: _stream(group) for name, group in groups.items()}
    specs = {name: stream.specs for name, stream in streams.items()}
    return save_checkpoint(folder, step, FileSet(specs, _pieces(streams)), meta, keep=keep, warn=warn)


def _pieces(streams: Mapping[str, TensorStream]) -> Iterator[tuple[str, memoryview]]:
    for name, stream in streams.items():
        pieces = stream_file(stream)
        next(pieces)  # the header
        yield from ((name, memoryview(piece)) for piece in pieces)


def _stream(group: Group) -> TensorStream:
    if isinstance(group, TensorStream):
        return group
    pairs = sorted(group.items(), key=lambda pair: -pair[1].dtype.itemsize)
    return TensorStream(tuple(TensorSpec.of(name, tensor) for name, tensor in pairs), pairs)
