"""The state of a microbatch during a step, and its place in a sequence that is computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

import torch

from roundpipe_cli.engine.step import Microbatch, Part
from roundpipe_cli.model.block_calls import BlockCall, Prologue
from roundpipe_cli.model.distillation import TeacherScores
from roundpipe_cli.model.head import HeadScores, map_tensors, target_rows
from roundpipe_cli.model.sequence_loss import Preference


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
    """[B, T], of a chunk those of all tokens up to its end, on the host; None for rows that are not packed."""
    prologue: Prologue | None = None
    calls_by_worker: dict[int, tuple[BlockCall, ...]] = field(default_factory=dict)
    """Block arguments on each worker's device, made once."""
    loss_sum: float | torch.Tensor | None = None
    target_weights: torch.Tensor | None = None
    """float32 [N]; None: 1."""
    preference: Preference | None = None
    teacher: TeacherScores | None = None
    """Figures of the N target tokens."""
    part_sums: torch.Tensor | None = None
    """As `HeadResult.part_sums`."""
    scores: HeadScores | None = None
    """Set in a pass without backward."""
    lengths: torch.Tensor | None = None
    """[B], tokens of each sequence without padding; None: all."""
    chunk: SequenceChunk | None = None
    """Place in its sequence; None: the microbatch is no chunk."""
    place: int = 0
    """Index among the microbatches of the whole step, of which this engine may compute a part; seeds dropout."""

    @property
    def num_units(self) -> float:
        """Number of its units; see `Microbatch`."""
        if self.preference is not None:
            return self.preference.num_rows(len(self.input_ids))
        return len(self.target_ids) if self.target_weights is None else float(self.target_weights.double().sum())


def microbatch_states(
    microbatches: Sequence[Microbatch], num_chunks: int, part: Part | None = None
) -> list[MicrobatchState]:
    """A step's microbatches, each sequence [B, T] cut into `num_chunks` of about equal length. Each has its own target
    tokens: the target of a chunk's last token is the next chunk's first. `part`: see `Engine.run_step`."""
    states: list[MicrobatchState] = []
    place = 0 if part is None else part.first * num_chunks
    for microbatch in microbatches:
        ids, (indices, targets) = microbatch.input_ids, target_rows(microbatch.labels)
        positions = microbatch.position_ids
        rows, columns = indices // ids.shape[1], indices % ids.shape[1]
        missing = num_chunks - ids.shape[1]
        if missing > 0:  # at least one token a chunk; added tokens are not trained
            ids = torch.cat([ids, ids[:, -1:].expand(-1, missing)], dim=1)
            if positions is not None:
                positions = torch.cat([positions, positions[:, -1:] + torch.arange(1, missing + 1)], dim=1)
        bounds = [ids.shape[1] * index // num_chunks for index in range(num_chunks + 1)]
        for number, (start, end) in enumerate(pairwise(bounds)):
            inside = (columns >= start) & (columns < end)
            own = rows[inside] * (end - start) + columns[inside] - start
            index = len(states)
            state = MicrobatchState(index, ids[:, start:end], own, targets[inside], place=place + index)
            state.position_ids = None if positions is None else positions[:, :end]
            if microbatch.weights is not None:  # of the token at an index, the target is the next one
                state.target_weights = microbatch.weights.flatten()[indices[inside] + 1]
            if microbatch.teacher is not None:
                state.teacher = map_tensors(microbatch.teacher, itemgetter(inside))
            if num_chunks > 1:
                state.chunk = SequenceChunk(number, num_chunks, start, end, ids.shape[1])
                assert microbatch.preference is None, "answers that are scored as wholes are not cut"
            else:
                state.preference, state.lengths = microbatch.preference, microbatch.lengths
            states.append(state)
    return states
