"""Boundary tensors between stages, in host memory, and the state of each microbatch.

A boundary is named by (kind, layer, microbatch): the hidden states at the input of `layer`, or their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from roundpipe_cli.engine.backends.base import DeviceEvent
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.model.block_calls import BlockCall, Prologue
from roundpipe_cli.model.head import HeadScores, Preference


class BoundaryKind(str, Enum):
    """Kinds of boundary tensors."""

    HIDDEN = "hidden"
    GRADIENT = "gradient"
    KEYS = "keys"
    """Names keys of a block's attention, which later chunks of the sequence read; `layer` is the block."""
    VALUES = "values"


BoundaryKey = tuple[BoundaryKind, int, int]


@dataclass(eq=False)
class Boundary:
    """A boundary tensor on the host."""

    tensor: torch.Tensor
    event: DeviceEvent
    """Event after which the tensor is complete."""
    num_to_take: int
    """Number of readers that have not asked for it yet."""


class BoundaryStore:
    """Host tensors that wait for their readers; each is dropped once the last reader has it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stored: dict[BoundaryKey, Boundary] = {}

    def put(self, key: BoundaryKey, tensor: torch.Tensor, event: DeviceEvent, num_readers: int) -> None:
        """Publish a boundary for `num_readers` readers."""
        if num_readers == 0:
            return
        with self._progress.condition:
            assert key not in self._stored, f"boundary {key} written twice"
            self._stored[key] = Boundary(tensor, event, num_readers)
        self._progress.moved()

    def take(self, key: BoundaryKey) -> Boundary:
        """Wait for a boundary, for one reader."""
        self._progress.wait_for(lambda: key in self._stored)
        found = self.take_if_there(key)
        assert found is not None
        return found

    def take_if_there(self, key: BoundaryKey) -> Boundary | None:
        """The same as `take`, or None if nothing was published."""
        with self._progress.lock:
            stored = self._stored.get(key)
            if stored is None:
                return None
            stored.num_to_take -= 1
            if stored.num_to_take == 0:
                del self._stored[key]
            return stored

    def __len__(self) -> int:
        return len(self._stored)


@dataclass(frozen=True)
class SequenceChunk:
    """The place of a chunk in its sequence."""

    index: int
    count: int
    """Number of chunks of the sequence."""
    start: int
    """Index of the first token."""
    end: int
    """Index behind the last token."""
    sequence_tokens: int
    """S"""

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass
class MicrobatchState:
    """State of one microbatch during a step."""

    index: int
    input_ids: torch.Tensor
    """[B, T], on the host."""
    target_indices: torch.Tensor
    """[N], positions of target tokens in B * T."""
    target_ids: torch.Tensor
    """[N]"""
    position_ids: torch.Tensor | None = None
    """[B, T], on the host; None for rows that are not packed."""
    prologue: Prologue | None = None
    calls_by_worker: dict[int, tuple[BlockCall, ...]] = field(default_factory=dict)
    """Block arguments on each worker's device, made once."""
    loss_sum: float | torch.Tensor | None = None
    preference: Preference | None = None
    reward_sums: torch.Tensor | None = None
    """Sums of which `Rewards` are the means; set for preference pairs."""
    scores: HeadScores | None = None
    """Set in a pass without backward."""
    lengths: torch.Tensor | None = None
    """[B], tokens of each sequence without padding; None: all."""
    chunk: SequenceChunk | None = None
    """Place in its sequence; None: the microbatch is no chunk."""
    place: int = 0
    """Index among the microbatches of the whole step, of which this engine may compute a part; seeds dropout."""

    @property
    def num_units(self) -> int:
        """Number of target tokens, or of pairs: the loss is a mean over them."""
        return len(self.target_ids) if self.preference is None else len(self.input_ids) // 2
